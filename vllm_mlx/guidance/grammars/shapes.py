"""Which arguments a call may have, by the schema of its tool: what formats with a tag for each argument go by."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from ...core.errors import InvalidParameter
from ...core.messages import ToolSpec
from ...formats.bodies.tool_schema import schemas_in
from ...formats.schema_budget import SchemaBudget
from .json_schema import checked_schema
from .lark import LarkWriter, either

MAX_SHAPES = 64
_ALTERNATIVES = ("anyOf", "oneOf")


@dataclass(frozen=True, slots=True)
class GuidedTool:
    """`param`: where the client gave its schema, for errors."""

    name: str
    parameters: Mapping[str, Any]
    param: str
    is_strict: bool = True

    @classmethod
    def of(cls, tool: ToolSpec, param: str, *, is_strict: bool, budget: SchemaBudget | None = None) -> "GuidedTool":
        """Without `is_strict` any arguments will do."""
        if not is_strict:
            return cls(tool.name, {"type": "object"}, param, is_strict=False)
        schema = checked_schema(tool.parameters or {}, param, budget)
        if not isinstance(schema, Mapping):
            raise InvalidParameter(f"`{param}` must be the schema of an object.", param=param)
        return cls(tool.name, {"type": "object", **schema}, param)


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """The arguments that a call may have: those that it must have first, each group in the schema's order."""

    arguments: tuple[tuple[str, Any, bool], ...]  # key, schema, whether it is required
    others: Any = None  # the schema of arguments that are not declared, where none is; None: there are no others


def object_shapes(schema: Mapping[str, Any], param: str, budget: SchemaBudget) -> list[ObjectShape]:
    """One for each alternative of the schema. Raises InvalidParameter for keywords that join arguments."""
    num_shapes = _num_alternatives(schema)
    if num_shapes > MAX_SHAPES:
        keyword = next(each for each in (*_ALTERNATIVES, "allOf") if isinstance(schema.get(each), list))
        message = (
            f"`{param}.{keyword}`: the arguments have more alternatives than the {MAX_SHAPES} that this model's format "
            "of calls takes. Those of `anyOf`, `oneOf` and `allOf` multiply: use fewer."
        )
        raise InvalidParameter(message, param=f"{param}.{keyword}")
    return [_shape(each, budget, param) for each in _alternatives(schema, param)]


def _num_alternatives(schema: Any) -> int:
    """As many as `_alternatives` gives."""
    if not isinstance(schema, Mapping):
        return int(schema is not False)
    lists = (schema[keyword] for keyword in _ALTERNATIVES if isinstance(schema.get(keyword), list))
    num = math.prod(sum(map(_num_alternatives, branches)) for branches in lists)
    return num * math.prod(map(_num_alternatives, _joined(schema)))


def _alternatives(schema: Any, param: str) -> Iterable[tuple[Mapping[str, Any], ...]]:
    """The schemas without alternatives that arguments follow together, for each alternative of this one."""
    if not _num_alternatives(schema):
        return []
    if not isinstance(schema, Mapping):
        return [()]
    _check_keywords(schema, param)
    choices = [
        [parts for branch in schema[keyword] for parts in _alternatives(branch, param)]
        for keyword in _ALTERNATIVES
        if isinstance(schema.get(keyword), list)
    ]
    choices += [list(_alternatives(each, param)) for each in _joined(schema)]
    return ((schema, *chain.from_iterable(chosen)) for chosen in product(*choices))


def _joined(schema: Mapping[str, Any]) -> list[Any]:
    return schemas_in(schema, "allOf")


def _check_keywords(schema: Mapping[str, Any], param: str) -> None:
    for keyword in ("patternProperties", "minProperties", "maxProperties", "$ref", "enum", "const"):
        if keyword in schema and not (keyword == "minProperties" and not schema[keyword]):
            path = f"{param}.{keyword}"
            raise InvalidParameter(f"`{path}` cannot be kept in this model's format of calls.", param=path)


def _shape(parts: Iterable[Mapping[str, Any]], budget: SchemaBudget, param: str) -> ObjectShape:
    """Of the schemas that the arguments follow together; what a later one says of an argument counts."""
    properties: dict[str, Any] = {}
    required: dict[str, None] = {}
    others: Any = True
    for part in parts:
        names, more = part.get("properties") or {}, part.get("required") or ()
        budget.spend(param, 1 + len(names) + len(more))
        properties |= names
        required |= dict.fromkeys(more)
        others = part.get("additionalProperties", others)
    for key in required:
        properties.setdefault(key, others)
    first = [(key, each, True) for key, each in properties.items() if key in required]
    rest = [(key, each, False) for key, each in properties.items() if key not in required and each is not False]
    return ObjectShape((*first, *rest), None if properties or others is False else others)


def separated(items: list[tuple[str, bool]], separator: str, writer: LarkWriter) -> str:
    """Items in their order, those that must stand first, with separators between those that do."""
    tail = ""
    starts: list[str] = []
    for number in range(len(items) - 1, -1, -1):
        expression, is_required = items[number]
        whole = f"{expression} {tail}".strip()
        starts.insert(0, whole)
        rest = f"({separator} {expression})" + ("" if is_required else "?")
        tail = writer.rule(f"{rest} {tail}".strip())
    num_required = sum(is_required for _, is_required in items)
    if not items:
        return '""'
    if num_required:
        return starts[0]
    return f"({either(starts)})?"
