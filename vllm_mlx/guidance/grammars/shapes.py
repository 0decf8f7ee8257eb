"""The sets of arguments that a tool's schema allows, for formats that write each argument by itself."""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, Literal

from ...core.errors import InvalidParameter, shown
from ...core.messages import ToolSpec
from ...formats.bodies.tool_schema import SchemaBudget, schemas_in
from .json_schema import Held, checked_schema, closed, refused
from .lark import LarkWriter, either

MAX_SHAPES = 64
_MAX_NAMES = 500
JOINING = ("patternProperties", "minProperties", "maxProperties", "$ref", "enum", "const")  # of several arguments
_ALTERNATIVES = ("anyOf", "oneOf")


Arguments = Held | Literal["names", "nothing"]  # the part of a tool's schema that a grammar holds
_LOOSER: Mapping[Arguments, Arguments] = {"known": "plain", "plain": "names", "names": "nothing"}


@dataclass(frozen=True, slots=True)
class GuidedTool:
    """A tool with guided calls. `param`: the request field that contains its schema, for errors."""

    name: str
    parameters: Mapping[str, Any]
    param: str
    is_strict: bool = True
    held: Arguments = "all"
    sent: Mapping[str, Any] | None = None  # the schema as the client sent it

    @classmethod
    def of(
        cls, tool: ToolSpec, param: str, *, is_strict: bool, held: Arguments = "all", budget: SchemaBudget | None = None
    ) -> "GuidedTool":
        """Check the tool's schema, and close it. Without `is_strict`, calls may have any arguments.

        Raises InvalidParameter if `held` is "all" and the schema cannot be enforced.
        """
        budget = SchemaBudget() if budget is None else budget
        sent = {"properties": {}} if tool.parameters is None else tool.parameters  # by the protocol: no arguments
        return cls(tool.name, {}, param, is_strict, held if is_strict else "nothing", sent)._checked(budget)

    @property
    def is_fixed(self) -> bool:
        """Return whether nothing more of its schema may be left out."""
        return self.held not in _LOOSER

    def looser(self, budget: SchemaBudget) -> "GuidedTool":
        """Return the tool, which is not fixed, with less of its schema held."""
        return replace(self, held=_LOOSER[self.held])._checked(budget)

    def freed(self) -> "GuidedTool":
        """Return the tool with nothing of its schema held, or the tool itself if all of it must be."""
        return self if self.held == "all" else replace(self, held="nothing", parameters={"type": "object"})

    def _checked(self, budget: SchemaBudget) -> "GuidedTool":
        match self.held:
            case "nothing":
                return replace(self, parameters={"type": "object"})
            case "names":
                return replace(self, parameters=_names_alone(self.sent))
            case held:
                num_visits = budget.num_visits
                try:
                    return replace(self, parameters=_object(self.sent, self.param, budget, held))
                except InvalidParameter:
                    if held == "all":
                        raise
                budget.num_visits = num_visits  # the budget that one tool would exceed is left for the others
                return replace(self, held="names", parameters=_names_alone(self.sent))


def _object(sent: Any, param: str, budget: SchemaBudget, held: Held) -> Any:
    schema = checked_schema(sent, param, budget, held=held)
    types = schema.get("type", "object") if isinstance(schema, Mapping) else () if held == "all" else "object"
    if "object" not in ([types] if isinstance(types, str) else types):
        raise refused(param, " must be the schema of an object.")
    return closed({**(schema if isinstance(schema, Mapping) else {}), "type": "object"}, param, budget)


def _names_alone(sent: Any) -> Mapping[str, Any]:
    """Return a schema of the declared names, each with any value."""
    properties = sent.get("properties") if isinstance(sent, Mapping) else None
    if not isinstance(properties, Mapping) or len(properties) > _MAX_NAMES:
        return {"type": "object"}
    required = [name for name in schemas_in(sent, "required") if isinstance(name, str) and name in properties]
    return {"type": "object", "properties": dict.fromkeys(properties, True), "required": required}


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """The arguments that a call may have: required ones first, otherwise in the schema's order."""

    arguments: tuple[tuple[str, Any, bool], ...]  # key, schema, whether it is required
    others: Any = None  # the schema of undeclared arguments; without it they are not allowed


def object_shapes(
    schema: Mapping[str, Any], param: str, budget: SchemaBudget, keys: Container[str]
) -> list[ObjectShape]:
    """Return a shape for each alternative of the schema. Raises InvalidParameter for keywords that join arguments.

    `keys`: the names of arguments that can be written. Others are left out, and refused if they are required.
    """
    num_shapes = _num_alternatives(schema)
    if num_shapes > MAX_SHAPES:
        keyword = next(name for name in (*_ALTERNATIVES, "allOf") if isinstance(schema.get(name), list))
        why = (
            f": the arguments have more than the {MAX_SHAPES} alternatives that this model's tool-call format allows. "
            "Alternatives of `anyOf`, `oneOf` and `allOf` multiply: use fewer."
        )
        raise refused(f"{param}.{keyword}", why)
    return [_shape(parts, budget, param, keys) for parts in _alternatives(schema, param)]


def _num_alternatives(schema: Any) -> int:
    """Count the alternatives that `_alternatives` returns, without listing them."""
    if not isinstance(schema, Mapping):
        return int(schema is not False)
    lists = (schema[keyword] for keyword in _ALTERNATIVES if isinstance(schema.get(keyword), list))
    num = math.prod(sum(map(_num_alternatives, branches)) for branches in lists)
    return num * math.prod(map(_num_alternatives, schemas_in(schema, "allOf")))


def _alternatives(schema: Any, param: str) -> Iterable[tuple[Mapping[str, Any], ...]]:
    """For each alternative of this schema, list the schemas that the arguments must follow together."""
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
    choices += [list(_alternatives(part, param)) for part in schemas_in(schema, "allOf")]
    return ((schema, *chain.from_iterable(chosen)) for chosen in product(*choices))


def _check_keywords(schema: Mapping[str, Any], param: str) -> None:
    for keyword in JOINING:
        if keyword in schema and not (keyword in ("minProperties", "patternProperties") and not schema[keyword]):
            raise refused(f"{param}.{keyword}", " cannot be enforced in this model's tool-call format.")


def _shape(parts: Iterable[Mapping[str, Any]], budget: SchemaBudget, param: str, keys: Container[str]) -> ObjectShape:
    """Merge schemas that the arguments must follow together; a later schema of an argument replaces an earlier one."""
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
        if key not in keys:
            why = " has a name that this model's tool-call format cannot carry. Rename it, best to letters, digits, "
            raise refused(f"{param}.properties.{shown(key)}", f"{why}`_`, `-` and `.` alone.")
    first = [(key, inner, True) for key, inner in properties.items() if key in required]
    rest = [
        (key, inner, False)
        for key, inner in properties.items()
        if key not in required and inner is not False and key in keys
    ]
    return ObjectShape((*first, *rest), None if properties or others is False else others)


def separated(items: list[tuple[str, bool]], separator: str, writer: LarkWriter) -> str:
    """Write items, required ones first, in order, with separators between the items that occur."""
    tail = ""
    starts: list[str] = []
    for number in range(len(items) - 1, -1, -1):
        expression, is_required = items[number]
        starts.insert(0, f"{expression} {tail}".strip())
        rest = f"({separator} {expression})" + ("" if is_required else "?")
        tail = writer.rule(f"{rest} {tail}".strip())
    if not items:
        return '""'
    return starts[0] if any(is_required for _, is_required in items) else f"({either(starts)})?"
