"""Bounds what a schema costs the grammar library when it joins keywords, because the costs multiply."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...core.errors import InvalidParameter
from ...formats.bodies.tool_schema import MAX_SCHEMA_VISITS, SchemaBudget, resolve, schemas_in

MAX_CONJUNCTS = 10  # patterns that one text must match; twenty take seconds to compile, forty take hours
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMA_VALUES = ("additionalProperties", "additionalItems", "items")
_JOINED = frozenset({"anyOf", "oneOf", "allOf", "$ref"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "$schema",
     "$id", "$comment", "$anchor", "$defs", "definitions"}
)  # fmt: skip
_LITERAL = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\(?s:.)|[^/\\])*/?')
_JSON = re.compile(r"%json\s*")


def check_conjunctions(schema: Any, param: str, budget: SchemaBudget) -> None:
    """Raises InvalidParameter for a schema in which `allOf` joins too many patterns: each is one more automaton."""
    if _SchemaNumbers(schema, param, budget, _num_conjuncts, 0).of(schema) > MAX_CONJUNCTS:
        message = f"`{param}`: `allOf` joins more than {MAX_CONJUNCTS} patterns. Write them as one."
        raise InvalidParameter(message, param=param)


def check_grammar(text: str, param: str, budget: SchemaBudget) -> None:
    """The same for a grammar in Lark notation: its operators, and the schemas inside it."""
    if len(re.findall("[&~]", _LITERAL.sub("", text))) > MAX_CONJUNCTS:
        message = f"`{param}`: a grammar takes at most {MAX_CONJUNCTS} of the operators `&` and `~`."
        raise InvalidParameter(message, param=param)
    for found in _JSON.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError:
            continue
        check_conjunctions(schema, param, budget)
        pay_for_alternatives(schema, param, budget)


def pay_for_alternatives(schema: Any, param: str, budget: SchemaBudget) -> None:
    """The grammar library joins every alternative of `anyOf` with every one of `oneOf`, `allOf` and `$ref` beside it.

    Each of these joined schemas costs a visit for itself and for each entry beside the alternatives. If nothing is
    beside them, nothing is joined. Raises InvalidParameter, naming `param` and the bound.
    """
    alternatives = _SchemaNumbers(schema, param, budget, _num_alternatives, 1)
    waiting, seen = [schema], set[int]()
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, Mapping) and id(inner) not in seen:
            seen.add(id(inner))
            num_beside = _num_beside(inner)
            if num_beside and (num := alternatives.of(inner)) > 1:
                for _ in range(num):
                    budget.spend(param, num_beside)
            waiting += _schemas_inside(inner, SCHEMA_MAPS, SCHEMA_LISTS)


class _SchemaNumbers:
    """A number for each schema, found by `read` from those of the schemas in it; every schema is read once."""

    def __init__(
        self,
        root: Any,
        param: str,
        budget: SchemaBudget,
        read: "Callable[[_SchemaNumbers, Mapping[str, Any]], int]",
        default: int,
    ):
        """`default` counts for what is no schema object, and for a schema that refers back to itself."""
        self._root = root
        self._param = param
        self._budget = budget
        self._read = read
        self.default = default
        self._known: dict[int, int] = {}  # by the id of the schema

    def of(self, schema: Any) -> int:
        if not isinstance(schema, Mapping):
            return self.default
        if id(schema) not in self._known:
            self._known[id(schema)] = self.default
            self._known[id(schema)] = min(self._read(self, schema), MAX_SCHEMA_VISITS)
        return self._known[id(schema)]

    def of_reference(self, schema: Mapping[str, Any]) -> int:
        """The number of the schema that `$ref` points to."""
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return self.default
        self._budget.spend(self._param, 1 + reference.count("/"))
        return self.of(resolve(reference, self._root))

    def spend(self) -> None:
        self._budget.spend(self._param)


def _num_alternatives(numbers: _SchemaNumbers, schema: Mapping[str, Any]) -> int:
    """How many schemas the alternatives of this one become once its keywords are joined."""
    num = 1
    for keyword in ("anyOf", "oneOf"):
        num *= sum(map(numbers.of, schemas_in(schema, keyword))) or 1
    for part in schemas_in(schema, "allOf"):
        num = min(num * numbers.of(part), MAX_SCHEMA_VISITS)
    return num * numbers.of_reference(schema)


def _num_conjuncts(numbers: _SchemaNumbers, schema: Mapping[str, Any]) -> int:
    """The most patterns that this schema, or any schema inside it, joins for one text."""
    numbers.spend()
    num = isinstance(schema.get("pattern"), str) + isinstance(schema.get("format"), str)
    num += numbers.of_reference(schema) + sum(map(numbers.of, schemas_in(schema, "allOf")))
    for keyword in ("anyOf", "oneOf"):
        num += max(map(numbers.of, schemas_in(schema, keyword)), default=0)
    inside = _schemas_inside(schema, ("properties", "patternProperties"), ("prefixItems", "items"))
    return num + max(map(numbers.of, inside), default=0)


def _num_beside(schema: Mapping[str, Any]) -> int:
    """Entries that each alternative is joined with; 0 where the schema is a plain choice or reference."""
    others = [value for keyword, value in schema.items() if keyword not in _JOINED | _ANNOTATIONS]
    entries = sum(len(value) if isinstance(value, list | dict) else 1 for value in others)
    num_factors = sum(keyword in schema for keyword in ("anyOf", "oneOf", "$ref")) + len(schemas_in(schema, "allOf"))
    return entries + max(0, num_factors - 1)


def _schemas_inside(schema: Mapping[str, Any], maps: Iterable[str], lists: Iterable[str]) -> Iterable[Any]:
    for keyword in maps:
        if isinstance(schema.get(keyword), Mapping):
            yield from schema[keyword].values()
    for keyword in lists:
        yield from schemas_in(schema, keyword)
    for keyword in SCHEMA_VALUES:
        yield schema.get(keyword)
