"""Limits on the size of one request, the same for every protocol. It knows no wire format."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from .config import SettingsGroup
from .errors import InvalidParameter, setting
from .guide import JsonSchema, StructuralFormat, StructuralTag
from .request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits(SettingsGroup):
    max_messages: int = Field(default=10_000, gt=0)
    max_tools: int = Field(default=1024, gt=0)
    max_schema_bytes: int = Field(default=256 * 1024, gt=0)  # size of one JSON schema, written as JSON
    max_choices: int = Field(default=1024, gt=0)  # replies to all prompts of one HTTP request together

    def check(self, request: Request) -> None:
        """Raises InvalidParameter, naming the limit."""
        self.check_messages(len(request.messages or ()))
        _at_most(
            len(request.tools) + len(request.unlisted_tools), self.max_tools, "tools", "tools", setting("max_tools")
        )
        for param, schema in _schemas(request):
            if schema and _is_longer(schema, self.max_schema_bytes):
                raise InvalidParameter(
                    f"A JSON schema in `{param}` is longer than {self.max_schema_bytes} bytes "
                    f"({setting('max_schema_bytes')}).",
                    param=param,
                )

    def check_messages(self, num_messages: int) -> None:
        """Raises InvalidParameter, naming the limit."""
        _at_most(num_messages, self.max_messages, "messages", "messages", setting("max_messages"))

    def check_choices(self, num_choices: int) -> None:
        """Raises InvalidParameter, naming the limit."""
        _at_most(num_choices, self.max_choices, "n", "choices", setting("max_choices"))


def _at_most(number: int, limit: int, param: str, noun: str, limit_name: str) -> None:
    if number > limit:
        message = f"This request has {number} {noun}; the server takes at most {limit} ({limit_name})."
        raise InvalidParameter(message, param=param)


def _is_longer(schema: Any, max_bytes: int) -> bool:
    """Whether the schema has more than `max_bytes` as JSON. It is only written if the lengths of its texts fit."""
    num_bytes, left = 0, [schema]
    while left and num_bytes <= max_bytes:
        value = left.pop()
        num_bytes += len(value) + 2 if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
    return num_bytes > max_bytes or len(json.dumps(schema)) > max_bytes


def _schemas(request: Request) -> Iterator[tuple[str, Any]]:
    for tool in (*request.tools, *request.unlisted_tools):
        yield "tools", tool.parameters
    guide = request.sampling.guide
    match None if guide is None else guide.form:
        case JsonSchema(schema):
            yield guide.param if guide else "", schema
        case StructuralFormat(tree):
            yield guide.param if guide else "", tree
        case StructuralTag(structures):
            for structure in structures:
                yield guide.param if guide else "", structure.schema
