"""How many patterns one text has to match at once: a product of automata, so the number is bounded."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.errors import InvalidParameter
from ...formats.bodies.tool_schema import resolve, schemas_in
from ...formats.schema_budget import SchemaBudget
from .alternatives import pay_for_alternatives

MAX_CONJUNCTS = 10  # twenty take seconds, forty hours
_LITERAL = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\(?s:.)|[^/\\])*/?')
_JSON = re.compile(r"%json\s*")


def check_conjunctions(schema: Any, param: str, budget: SchemaBudget) -> None:
    """Raises InvalidParameter for a schema in which `allOf` joins too many patterns."""
    if _Conjuncts(schema, param, budget).num(schema) > MAX_CONJUNCTS:
        message = f"`{param}`: `allOf` joins more than {MAX_CONJUNCTS} patterns. Write them as one."
        raise InvalidParameter(message, param=param)


def check_grammar(text: str, param: str, budget: SchemaBudget) -> None:
    """The same of a grammar in Lark's notation, and of the schemas in it."""
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


class _Conjuncts:
    def __init__(self, root: Any, param: str, budget: SchemaBudget):
        self._root = root
        self._param = param
        self._budget = budget
        self._known: dict[int, int] = {}  # by the id of the schema

    def num(self, schema: Any) -> int:
        """The most patterns that this schema joins for one text, or any schema inside of it."""
        if not isinstance(schema, Mapping):
            return 0
        if id(schema) not in self._known:
            self._budget.spend(self._param)
            self._known[id(schema)] = 0  # what refers to itself joins itself once
            self._known[id(schema)] = self._sum(schema)
        return self._known[id(schema)]

    def _sum(self, schema: Mapping[str, Any]) -> int:
        own = isinstance(schema.get("pattern"), str) + isinstance(schema.get("format"), str)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            self._budget.spend(self._param, reference.count("/"))
            own += self.num(resolve(reference, self._root))
        own += sum(map(self.num, schemas_in(schema, "allOf")))
        for keyword in ("anyOf", "oneOf"):
            own += max(map(self.num, schemas_in(schema, keyword)), default=0)
        return own + max(map(self.num, _inner(schema)), default=0)


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    for keyword in ("properties", "patternProperties"):
        if isinstance(schema.get(keyword), Mapping):
            yield from schema[keyword].values()
    yield from schemas_in(schema, "prefixItems")
    yield schema.get("items")
    yield schema.get("additionalProperties")
