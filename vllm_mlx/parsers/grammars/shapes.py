"""Which arguments a call may have, by the schema of its tool: what formats with a tag for each argument go by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.errors import InvalidParameter
from ...core.messages import ToolSpec
from .json_schema import checked_schema
from .lark import LarkWriter, either


@dataclass(frozen=True, slots=True)
class GuidedTool:
    """`param`: where the client gave its schema, for errors."""

    name: str
    parameters: Mapping[str, Any]
    param: str
    is_strict: bool = True

    @classmethod
    def of(cls, tool: ToolSpec, param: str, *, is_strict: bool) -> "GuidedTool":
        """Without `is_strict` any arguments will do."""
        if not is_strict:
            return cls(tool.name, {"type": "object"}, param, is_strict=False)
        schema = checked_schema(tool.parameters or {}, param)
        if not isinstance(schema, Mapping):
            raise InvalidParameter(f"`{param}` must be the schema of an object.", param=param)
        return cls(tool.name, {"type": "object", **schema}, param)


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """The arguments that a call may have: those that it must have first, each group in the schema's order."""

    arguments: tuple[tuple[str, Any, bool], ...]  # key, schema, whether it is required
    others: Any = None  # the schema of arguments that are not declared, where none is; None: there are no others


def object_shapes(tool: GuidedTool) -> list[ObjectShape]:
    """One for each alternative of the schema. Raises InvalidParameter for keywords that join arguments."""
    schema = tool.parameters
    for keyword in ("patternProperties", "minProperties", "maxProperties", "$ref", "enum", "const"):
        if keyword in schema and not (keyword == "minProperties" and not schema[keyword]):
            path = f"{tool.param}.{keyword}"
            raise InvalidParameter(f"`{path}` cannot be kept in this model's format of calls.", param=path)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            rest = {key: value for key, value in schema.items() if key != keyword}
            branches = [GuidedTool(tool.name, _merged(rest, each), tool.param) for each in schema[keyword]]
            return [shape for branch in branches for shape in object_shapes(branch)]
    if isinstance(schema.get("allOf"), list):
        merged: Mapping[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
        for each in schema["allOf"]:
            merged = _merged(merged, each)
        return object_shapes(GuidedTool(tool.name, merged, tool.param))
    return [_shape(schema)]


def _shape(schema: Mapping[str, Any]) -> ObjectShape:
    properties = dict(schema.get("properties") or {})
    required = list(schema.get("required") or ())
    others = schema.get("additionalProperties", True)
    for key in required:
        properties.setdefault(key, others)
    first = [(key, each, True) for key, each in properties.items() if key in required]
    rest = [(key, each, False) for key, each in properties.items() if key not in required and each is not False]
    return ObjectShape((*first, *rest), None if properties or others is False else others)


def _merged(schema: Mapping[str, Any], other: Any) -> Mapping[str, Any]:
    if not isinstance(other, Mapping):
        return schema
    properties = {**(schema.get("properties") or {}), **(other.get("properties") or {})}
    required = [*(schema.get("required") or ()), *(other.get("required") or ())]
    return {**schema, **other, "properties": properties, "required": list(dict.fromkeys(required))}


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
