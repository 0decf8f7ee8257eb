"""Finds the JSON types that a tool's schema allows for each argument. Every schema is visited once."""

from collections.abc import Iterable, Mapping
from typing import Any

from ...core.errors import InvalidParameter

Types = frozenset[str] | None  # None if the schema does not say
STRING: Types = frozenset({"string"})

MAX_SCHEMA_VISITS = 100_000  # by all schemas of one request
_MAX_DEPTH = 64  # alternatives and references inside each other; a deeper schema says nothing
_MAX_REFERENCES = 16  # that refer to one another in a chain


class SchemaBudget:
    """A budget of visits. Every walk over a request's schemas spends from it before it does the work."""

    def __init__(self, max_visits: int = MAX_SCHEMA_VISITS):
        self._max_visits = max_visits
        self.num_visits = 0

    def spend(self, param: str, num: int = 1) -> None:
        """Pay for visiting `num` schemas or values. Raises InvalidParameter, naming `param` and the limit."""
        self.num_visits += num
        if self.num_visits > self._max_visits:
            raise InvalidParameter(
                f"`{param}`: the schemas of this request are too complex. Together they may take at "
                f"most {self._max_visits} visits of a schema or value. Send fewer tools, or simpler schemas.",
                param=param,
            )


class SchemaTypes:
    """The types that schemas allow. Their references point into `root`; `param` names them in errors."""

    def __init__(self, root: Mapping[str, Any], budget: SchemaBudget, param: str):
        self._root = root
        self._budget = budget
        self._param = param
        self._known: dict[int, tuple[Any, Types]] = {}  # by id; the schema is held, so that its id stays its own
        self._targets: dict[str, Any] = {}
        self._depth = 0

    def of(self, schema: Any) -> Types:
        """Return the types of a schema. Raises InvalidParameter when the budget is spent.

        A schema that only refers back to itself says nothing.
        """
        if not isinstance(schema, Mapping):
            return None
        known = self._known.get(id(schema))
        if known is not None:
            return known[1]
        if self._depth == _MAX_DEPTH:
            return None
        self._budget.spend(self._param)
        self._known[id(schema)] = schema, None
        self._depth += 1
        try:
            self._known[id(schema)] = schema, self._read(schema)
        finally:
            self._depth -= 1
        return self._known[id(schema)][1]

    def target(self, reference: str) -> Any:
        """Return the schema that the reference points to, or None if it points to nothing."""
        if reference not in self._targets:
            self._budget.spend(self._param, reference.count("/"))
            self._targets[reference] = resolve(reference, self._root)
        return self._targets[reference]

    def resolved(self, schema: Any) -> Any:
        """Return the schema itself, or the one that it refers to."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = self.target(schema["$ref"])
        return schema

    def _read(self, schema: Mapping[str, Any]) -> Types:
        match schema:
            case {"$ref": str(reference)}:
                return self.of(self.target(reference))
            case {"type": str(name)}:
                types = frozenset({name})
            case {"type": [*names]}:
                self._budget.spend(self._param, len(names))
                types = frozenset(name for name in names if isinstance(name, str))
            case {"const": value}:
                types = frozenset({_type_of(value)})
            case {"enum": [_, *_] as values}:
                self._budget.spend(self._param, len(values))
                types = frozenset(map(_type_of, values))
            case {"anyOf": [_, *_] as branches} | {"oneOf": [_, *_] as branches}:
                return self._union(branches)
            case {"allOf": [_, *_] as branches}:
                self._budget.spend(self._param, len(branches))
                known = [allowed for branch in branches if (allowed := self.of(branch)) is not None]
                return frozenset.intersection(*known) if known else None
            case {"properties": _}:
                types = frozenset({"object"})
            case {"items": _}:
                types = frozenset({"array"})
            case _:
                return None
        return types | {"null"} if schema.get("nullable") is True else types

    def _union(self, branches: list[Any]) -> Types:
        self._budget.spend(self._param, len(branches))
        union: frozenset[str] = frozenset()
        for branch in branches:
            types = self.of(branch)
            if types is None:
                return None
            union |= types
        return union


class ToolSchema(SchemaTypes):
    """The arguments of one tool, by the schema of its parameters. The constructor visits the complete schema."""

    def __init__(self, parameters: Any = None, budget: SchemaBudget | None = None, param: str = "parameters"):
        """Read the schema. Raises InvalidParameter, naming `param`, when the budget is spent; None: a whole budget."""
        root: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        super().__init__(root, SchemaBudget() if budget is None else budget, param)
        self._properties = _properties(self._root)
        self._visit_all()

    def declares(self, name: str) -> bool | None:
        """Return whether the tool has this argument, or None if its schema declares no arguments."""
        return name in self._properties if self._properties is not None else None

    def types(self, name: str) -> Types:
        """Return the types of the argument with this name."""
        schema = (self._properties or {}).get(name)
        return self.of(self._root.get("additionalProperties") if schema is None else schema)

    def child(self, name: str, schema: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Return the schema of a property of `schema`, or of its items if `name` is "item", or {} without one.

        Without `schema`, it is the schema of the arguments.
        """
        schema = self.resolved(self._root if schema is None else schema)
        if not isinstance(schema, Mapping):
            return {}
        child = (_properties(schema) or {}).get(name)
        child = schema.get("items") if child is None and name == "item" else child
        return child if isinstance(child, Mapping) else {}

    def _visit_all(self) -> None:
        """Visit everything now, so that reading a reply looks up known types only."""
        visited: set[int] = set()
        others = self._root.get("additionalProperties")
        self.of(others)
        left = [self._root, others]
        while left:
            schema = self.resolved(left.pop())
            if isinstance(schema, Mapping) and id(schema) not in visited:
                visited.add(id(schema))
                children = [*(_properties(schema) or {}).values(), schema.get("items")]
                self._budget.spend(self._param, len(children))
                for child in children:
                    self.of(child)
                left += children


def read_schemas(tools: Iterable[tuple[str, Any, str]], budget: SchemaBudget) -> "Schemas":
    """Read the schemas of `tools`: (name, schema of the parameters, the request field that contains it)."""
    return {name: ToolSchema(parameters, budget, param) for name, parameters, param in tools}


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema in `root` that the reference points to, or None if it points to nothing."""
    if not reference.startswith("#"):
        return None
    node: Any = root
    for key in reference[1:].split("/")[1:]:
        node = node.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else None


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


Schemas = Mapping[str, ToolSchema]  # by the name of the tool
ANY_ARGUMENTS = ToolSchema()


def schemas_in(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the schemas that a keyword lists, or [] if its value is not a list."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
