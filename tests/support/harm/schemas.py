"""Odd JSON schemas, regular expressions and grammars: exponential, recursive, wide, deep, or wrong."""

import random
from collections.abc import Callable
from typing import Any

from .values import SURROGATE, Raw, deep, long_text, wide_object

Schema = Any


def reference_tree(chance: random.Random, num_bytes: int) -> Schema:
    """Definitions that each refer to the next one several times: a walk along every branch never ends."""
    depth = chance.choice([6, 12, 30])
    width = max(2, min(200, num_bytes // (24 * depth)))
    keyword = chance.choice(["anyOf", "oneOf", "allOf"])
    definitions = {f"d{at}": {keyword: [{"$ref": f"#/$defs/d{at + 1}"}] * width} for at in range(depth)}
    return _object({"a": {"$ref": "#/$defs/d0"}}, **{"$defs": definitions | {f"d{depth}": {"type": "string"}}})


def alternatives(chance: random.Random, num_bytes: int) -> Schema:
    """Keywords whose branches multiply."""
    branch = chance.choice([{}, {"required": ["a"]}, {"properties": {"b": {"type": "integer"}}}])
    width = max(2, num_bytes // (2 * len(str(branch)) + 4))
    keywords = chance.choice([("anyOf", "oneOf"), ("anyOf", "allOf"), ("oneOf", "allOf"), ("anyOf", "oneOf", "allOf")])
    return _object({"a": {"type": "string"}}, **{keyword: [branch] * (width // len(keywords)) for keyword in keywords})


def recursion(chance: random.Random, num_bytes: int) -> Schema:
    loops: list[Any] = [
        {"$ref": "#/$defs/a"},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
        {"type": ["string", "integer"], "anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 2},
        {"$ref": "#"},
        {"not": {"$ref": "#/$defs/a"}},
    ]
    return _object({"a": {"$ref": "#/$defs/a"}}, **{"$defs": {"a": chance.choice(loops)}})


def wide(chance: random.Random, num_bytes: int) -> Schema:
    num = max(1, num_bytes // 32)
    kinds: list[Any] = [
        lambda: _object({f"property_{at}": {"type": "string"} for at in range(num)}),
        lambda: _object({"a": {"enum": [f"a longer choice {at}" for at in range(num)]}}),
        lambda: _object({"a": {"type": "string"}}, required=[f"property_{at}" for at in range(num)]),
        lambda: _object({"a": {"type": ["string"] * num}}),
        lambda: _object({"a": {"anyOf": [{"const": at} for at in range(num)]}}),
        lambda: _object({"a": {"anyOf": [{"type": "string", "pattern": f"^a{{{at}}}$"} for at in range(num)]}}),
        lambda: _object({"a": {"type": "string", "description": long_text(chance, num_bytes)}}),
        lambda: {"type": "object", "patternProperties": {f"^a{at}": {"type": "string"} for at in range(num)}},
    ]
    return chance.choice(kinds)()


def wrong(chance: random.Random, num_bytes: int) -> Schema:
    inner: list[Any] = [
        {"type": "object", "properties": 5},
        {"type": "object", "anyOf": [{"properties": [1]}]},
        _object({"a": {"type": "string", "format": ["x"]}}),
        _object({"a": {"type": "string", "pattern": "(" * min(num_bytes, 1000)}}),
        _object({"a": {"type": 7}}),
        _object({"a": {"$ref": 5}}),
        _object({"a": {"$ref": "#/nowhere"}}),
        _object({"a": {"$ref": "http://127.0.0.1:1/x"}}),
        _object({"a": {"enum": 5}}),
        _object({"a": {"enum": []}}),
        _object({"a": {"items": [1]}}),
        _object({"a": {"anyOf": {}}}),
        _object({"a": {"anyOf": [0]}}),
        _object({SURROGATE: {"type": "string"}}),
        _object({"a": {"const": SURROGATE}}),
        _object({"a": {"type": "string", "minLength": 10**9}}),
        _object({"a": {"type": "string", "minLength": Raw("1" + "0" * 400)}}),
        _object({"a": {"type": "number", "multipleOf": 0}}),
        _object({"a": {"type": "number", "minimum": Raw("1e999")}}),
        _object({"a": {"type": "array", "minItems": 10**9, "items": {"type": "string"}}}),
        _object({"a": {"default": deep(chance, min(num_bytes, 6000))}}),
        {"type": "object", "required": "a"},
        {"$defs": wide_object(chance, num_bytes), "type": "object"},
        deep(chance, num_bytes),
    ]
    return chance.choice(inner)


def nested(chance: random.Random, num_bytes: int) -> Schema:
    depth = max(1, min(chance.choice([10, 40]), num_bytes // 60))
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = chance.choice(
            [_object({"a": schema}), {"type": "array", "items": schema}, {"anyOf": [schema, schema]}]
        )
        if len(str(schema)) > num_bytes:
            break
    return _object({"a": schema})


def patterns(chance: random.Random, num_bytes: int) -> Schema:
    """Strings by regular expressions that are small as text and large as automata."""
    return _object({"a": {"type": "string", "pattern": nested_counts(chance)}})


def nested_counts(chance: random.Random) -> str:
    """A short regular expression whose counts multiply."""
    pattern = chance.choice(["a", "(a|b)", "a?", "[a-z]", "\\w", "."])
    for _ in range(chance.randrange(2, 6)):
        most = chance.choice([10, 50, 100, 115])
        pattern = f"({pattern}){{{chance.choice(['', '0,', '1,'])}{most}}}"
    return pattern


SCHEMAS: tuple[Callable[[random.Random, int], Schema], ...] = (
    reference_tree,
    alternatives,
    recursion,
    wide,
    wrong,
    nested,
    patterns,
)


def odd_schema(chance: random.Random, num_bytes: int) -> Schema:
    return chance.choice(SCHEMAS)(chance, num_bytes)


def odd_regex(chance: random.Random, num_bytes: int) -> str:
    num = max(1, min(num_bytes, 200_000))
    kinds = ["(a{1000}){1000}", "(a|a)*" * (num // 6 + 1), ".{0,100000}", "(" * num, "[ab]*a[ab]{40}", "a" * num]
    kinds += [
        "(a?){500}a{500}",
        "\\p{L}*" * (num // 6 + 1),
        "(.*,){30}",
        "|".join(f"x{at}" for at in range(num // 7 + 1)),
    ]
    kinds += [
        nested_counts(chance),
        "(|a)" * (num // 4 + 1),
        "(a||b)" * (num // 6 + 1),
        "(a{0,9}){0,9}" * (num // 13 + 1),
    ]
    kinds += ["/" * num + "\\", '\\"' * (num // 2), "\\/" * (num // 2), "/*" * (num // 2), '"/' * (num // 2)]
    kinds += [SURROGATE, "", "[", "(?=a)b", "(a)\\1", "^$" * (num // 2 + 1), "(x+x+)+y"]
    return chance.choice(kinds)


def odd_grammar(chance: random.Random, num_bytes: int) -> str:
    num = max(1, min(num_bytes // 12, 20_000))
    kinds = [
        'start: s\ns: s s s | s s | "a" | "b" | ',
        "start: r0\n" + "\n".join(f'r{at}: r{at + 1} r{at + 1} | "x"' for at in range(min(num, 500))) + '\nr500: "a"',
        "start: " + " | ".join(f'"w{at}"' for at in range(num)),
        "start: " + "(" * num,
        'start: start "a" | "a"',
        "start: /(a|b)*a(a|b){60}/",
        f'start: "{"a" * num}"',
        *('start: "a"\n' + piece * (num * 12 // len(piece)) for piece in ('\\"', "\\/", "/", '"', "//", '"\\')),
        "start: A\nA: " + '"a"? ' * num,
        'start: A\nE: ""\nA: ' + '("a"|E) ' * num,
        f"start: /{nested_counts(chance)}/",
        SURROGATE,
        "",
        'root ::= "a" root',
    ]
    return chance.choice(kinds)


def _object(properties: dict[str, Any], **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)[:50], **keywords}
