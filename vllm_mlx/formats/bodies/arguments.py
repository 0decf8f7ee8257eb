"""Writes a JSON object from arguments that arrive as text, one after the other."""

import json

from .schema import decode, may_be_value
from .tool_schema import ANY_ARGUMENTS, STRING, ToolSchema, Types


class ArgumentsWriter:
    """Strings leave as they arrive; a value that may be of another type leaves when it is complete."""

    def __init__(self, schema: ToolSchema | None):
        """`schema`: of the tool; None: it is not declared."""
        self._schema = ANY_ARGUMENTS if schema is None else schema
        self._seen: set[str] = set()
        self._out: list[str] = []
        self._types: Types = STRING
        self._held: list[str] | None = None  # of a value whose type is not known yet; None: it is a string
        self._is_compound = False  # what is held begins an object or a list

    def take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def expects(self, name: str) -> bool | None:
        """Whether the schema declares an argument that has not come yet; None: it declares none at all."""
        is_declared = self._schema.declares(name)
        return is_declared if is_declared is None else is_declared and name not in self._seen

    def begin(self, name: str, *, is_string: bool | None = None) -> None:
        """`is_string`: what the model says of the value, which counts before the schema."""
        self._begin(name)
        types = self._schema.types(name)
        if is_string is False and types is not None and "string" in types:
            types = None
        self._types = STRING if is_string else types
        self._held = []
        self._is_compound = False
        self._release()

    def add(self, name: str, value: str) -> None:
        """An argument as JSON."""
        self._begin(name)
        self._out.append(value)

    def _begin(self, name: str) -> None:
        self._out.append(f"{', ' if self._seen else '{'}{_quoted(name)}: ")
        self._seen.add(name)

    def feed(self, text: str) -> None:
        if self._held is None:
            self._out.append(_quoted(text)[1:-1])
        else:
            self._held.append(text)
            if not self._is_compound:
                self._release()

    def end(self) -> None:
        if self._held is not None:
            held = "".join(self._held)
            value = decode(held, self._types)
            self._out.append(_quoted(held) if value is None else value)
        else:
            self._out.append('"')

    def cut(self) -> None:
        """The reply ends inside a value: give what there is of it, unclosed."""
        if self._held:
            held = "".join(self._held)
            is_string = self._types is not None and "string" in self._types
            self._out.append(_quoted(held)[:-1] if is_string else held.lstrip())

    def close(self) -> None:
        self._out.append("}" if self._seen else "{}")

    def _release(self) -> None:
        assert self._held is not None
        held = "".join(self._held)
        if not may_be_value(held, self._types):
            self._out.append(_quoted(held)[:-1])
            self._held = None
        else:
            self._is_compound = held.lstrip()[:1] in ("{", "[")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
