"""How many alternatives a schema has once its keywords are joined: they multiply, so they are paid for first."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...formats.bodies.tool_schema import resolve, schemas_in
from ...formats.schema_budget import MAX_SCHEMA_VISITS, SchemaBudget

_SAYS_NOTHING = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "$schema",
     "$id", "$comment", "$anchor", "$defs", "definitions"}
)  # fmt: skip
_JOINED = frozenset({"anyOf", "oneOf", "allOf", "$ref"})
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def pay_for_alternatives(schema: Any, param: str, budget: SchemaBudget) -> None:
    """The grammar library joins every alternative of `anyOf` with every one of `oneOf`, `allOf` and `$ref` beside it.

    Each of these joined schemas costs a visit for itself and for each entry beside the alternatives. Where nothing
    stands beside them, nothing is joined. Raises InvalidParameter, naming `param` and the bound.
    """
    alternatives = _Alternatives(schema, param, budget)
    waiting, seen = [schema], set[int]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping) and id(each) not in seen:
            seen.add(id(each))
            num_beside = _num_beside(each)
            if num_beside and (num := alternatives.num(each)) > 1:
                for _ in range(num):
                    budget.spend(param, num_beside)
            waiting += _inner(each)


class _Alternatives:
    def __init__(self, root: Any, param: str, budget: SchemaBudget):
        self._root = root
        self._param = param
        self._budget = budget
        self._known: dict[int, int] = {}  # by the id of the schema

    def num(self, schema: Any) -> int:
        if not isinstance(schema, Mapping):
            return 1
        if id(schema) not in self._known:
            self._known[id(schema)] = 1  # what refers to itself is not joined again
            self._known[id(schema)] = min(self._product(schema), MAX_SCHEMA_VISITS)
        return self._known[id(schema)]

    def _product(self, schema: Mapping[str, Any]) -> int:
        num = 1
        for keyword in ("anyOf", "oneOf"):
            num *= sum(map(self.num, schemas_in(schema, keyword))) or 1
        for each in schemas_in(schema, "allOf"):
            num = min(num * self.num(each), MAX_SCHEMA_VISITS)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            self._budget.spend(self._param, 1 + reference.count("/"))
            num *= self.num(resolve(reference, self._root))
        return num


def _num_beside(schema: Mapping[str, Any]) -> int:
    """Entries that each alternative is joined with; 0 where the schema is a plain choice or reference."""
    others = [value for keyword, value in schema.items() if keyword not in _JOINED | _SAYS_NOTHING]
    entries = sum(len(value) if isinstance(value, list | dict) else 1 for value in others)
    num_factors = sum(keyword in schema for keyword in ("anyOf", "oneOf", "$ref")) + len(schemas_in(schema, "allOf"))
    return entries + max(0, num_factors - 1)


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), Mapping):
            yield from schema[keyword].values()
    for keyword in _LISTS:
        yield from schemas_in(schema, keyword)
    for keyword in ("items", "additionalProperties", "additionalItems"):
        yield schema.get(keyword)
