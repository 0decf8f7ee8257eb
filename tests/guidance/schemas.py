"""Sixty JSON schemas and thirty sets of tools, every reply to which is of bounded length."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]


def validate(value: Any, schema: Schema) -> None:
    """Raise ValidationError for a value that does not follow the schema, which is checked once."""
    _validator(json.dumps(schema)).validate(value)


@cache
def _validator(text: str) -> Draft202012Validator:
    Draft202012Validator.check_schema(json.loads(text))
    return Draft202012Validator(json.loads(text))


def closed(required: list[str] | None = None, **properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def text(most: int = 10, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def whole(low: int = 0, high: int = 99) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def several(items: Any, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


FLAG: Schema = {"type": "boolean"}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
SCALARS: tuple[Schema, ...] = (
    text(),
    text(4, minLength=4),
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "enum": ["red", "green", "blue sky"]},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    whole(),
    whole(-5, 5),
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    SHARE,
    FLAG,
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"const": {"fixed": [1, 2, "three"]}},
    {"enum": [1, "one", None, [1], {"a": 1}]},
)


def _families() -> Iterator[Schema]:
    for scalar in SCALARS:
        yield scalar
        yield closed(value=scalar)
        yield several(scalar, 2)
    yield closed()
    yield closed([], a=whole(), b=text(5), c=FLAG)
    yield closed(["b"], a=whole(), b=text(5), c=FLAG)
    yield closed(name=text(), age=whole(0, 150), tags=several({"enum": ["a", "b"]}))
    yield closed(outer=closed(inner=closed(leaf=whole())))
    yield closed(points=several(closed(x=whole(), y=whole()), 3, 1))
    yield {"anyOf": [whole(), text(3), FLAG]}
    yield {"oneOf": [closed(kind={"const": "a"}, a=whole()), closed(kind={"const": "b"}, b=text(4))]}
    yield {"allOf": [closed(a=whole(), b=text(4)), {"type": "object"}]}
    yield {"type": "array", "prefixItems": [whole(), text(3), FLAG], "items": False, "minItems": 3}
    yield {
        "$ref": "#/$defs/pair",
        "$defs": {"pair": closed(left=whole(), right={"$ref": "#/$defs/name"}), "name": text(5)},
    }
    yield {**closed(["id"], id=whole()), "additionalProperties": {"type": "null"}, "maxProperties": 3}
    yield {
        "type": "object",
        "patternProperties": {"^[ab]$": whole()},
        "additionalProperties": False,
        "maxProperties": 2,
    }
    yield closed(
        title=text(8, description="A title."), done={**FLAG, "default": False}, at={"type": "string", "format": "time"}
    )
    yield closed(matrix=several(several(whole(0, 9), 2, 2), 2, 2))


SCHEMAS: tuple[Schema, ...] = tuple(_families())


def _tool_sets() -> Iterator[dict[str, Schema]]:
    arguments = [
        closed(["city"], city=text(), days=whole(1, 9), units={"enum": ["c", "f"]}),
        closed(),
        closed(path=text(12), force=FLAG),
        closed(query=text(12), most=whole(1, 20), tags=several({"enum": ["x", "y"]}, 2)),
        closed(["a"], a=SHARE, b={"type": ["string", "null"], "maxLength": 5}),
        closed(place=closed(x=whole(), y=whole()), day={"type": "string", "format": "date"}),
        closed(edits=several(closed(old=text(6), new=text(6)), 2, 1)),
        closed(code={"type": "string", "pattern": "^[a-z_]{1,12}$"}, line=whole()),
        closed(either={"anyOf": [whole(), FLAG]}),
        {**closed(who={"$ref": "#/$defs/name"}), "$defs": {"name": text(6)}},
    ]
    for number, schema in enumerate(arguments):
        yield {f"tool_{number}": schema}
        yield {f"tool_{number}": schema, "other": arguments[(number + 3) % 10]}
        yield {f"tool_{each}": arguments[(number + each) % 10] for each in range(4)}


TOOL_SETS: tuple[dict[str, Schema], ...] = tuple(_tool_sets())
