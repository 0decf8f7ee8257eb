"""Hostile JSON values of a given size: long texts, wide arrays, deep nests, odd numbers, odd JSON schemas.

Each is made of a random number generator and a number of bytes alone, so that a seed draws it again.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Draw = Callable[[random.Random, int], Any]

SURROGATE = "\ud83d"
_UNITS = {
    "one character": "a",
    "words": "the fox sees a river and ",
    "numbers": "1234567890 ",
    "spaces": " ",
    "lines": "\n",
    "emoji": "\U0001f600",
    "half a surrogate pair": SURROGATE,
    "marks": "e\u0301\u0323",
    "quotes": '\\"',
    "nulls": "\0",
    "commas": ",",
    "special tokens": "<|im_start|>",
    "image tokens": "<|vision_start|><|image_pad|><|vision_end|>",
    "call tags": "<tool_call>\n<function=x>\n<parameter=a>\n",
    "thought tags": "<think>",
    "braces": "{{",
    "JSON": '{"a":[1,2]},',
}
_ITEMS: tuple[Any, ...] = (0, "", None, True, [], {}, 1.5, "x", -1, [[]], {"a": 0}, {"type": "text", "text": ""})


@dataclass(frozen=True, slots=True)
class Raw:
    """JSON text that stands in a body as it is."""

    text: str


def dumps(value: Any) -> bytes:
    """JSON in ASCII, with raw parts, half surrogate pairs and what else a wrong client might send."""
    raws: list[str] = []

    def keep(raw: Any) -> str:
        raws.append(raw.text)
        return f"\0raw{len(raws) - 1}\0"

    text = json.dumps(value, default=keep, separators=(",", ":"))
    for number, raw in enumerate(raws):
        text = text.replace(f'"\\u0000raw{number}\\u0000"', raw, 1)
    return text.encode()


def repeated(item: Any, num_bytes: int) -> Raw:
    """An array of one item again and again."""
    text = dumps(item).decode()
    return Raw(f"[{','.join([text] * max(1, num_bytes // (len(text) + 1)))}]")


def long_text(chance: random.Random, num_bytes: int) -> str:
    unit = chance.choice(list(_UNITS.values()))
    return unit * max(1, num_bytes // len(json.dumps(unit)[1:-1]))


def number(chance: random.Random, num_bytes: int) -> Raw:
    digits = chance.choice([19, 20, 100, 308, 309, 310, 400, 4000, 4300, 4301, min(num_bytes, 100_000)])
    huge = "1" + "0" * digits
    return Raw(chance.choice([huge, f"-{huge}", f"{huge}.0", "1e308", "1e999", "NaN", "-Infinity", "-0", "1e-999"]))


def wrong_array(chance: random.Random, num_bytes: int) -> Raw:
    return repeated(chance.choice(_ITEMS), num_bytes)


def distinct_array(chance: random.Random, num_bytes: int) -> Raw:
    items = range(max(1, num_bytes // 8))
    mark = chance.choice(["", '"'])
    return Raw("[" + ",".join(f"{mark}{each}{mark}" for each in items) + "]")


def wide_object(chance: random.Random, num_bytes: int) -> Raw:
    value = chance.choice(["0", '""', "{}", "[]", "1.5", "-100"])
    is_repeated = chance.random() < 0.3
    keys = range(max(1, num_bytes // (8 + len(value))))
    members = (f'"{0 if is_repeated else key}":{value}' for key in keys)
    return Raw("{" + ",".join(members) + "}")


def deep(chance: random.Random, num_bytes: int) -> Raw:
    depth = chance.choice([60, 120, 500, 990, max(1, num_bytes // 6)])
    opened, closed = chance.choice([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
    return Raw(opened * depth + "0" + closed * depth)


def text_beside(chance: random.Random, num_bytes: int) -> Any:
    """Short texts of an odd kind."""
    return chance.choice([SURROGATE, f"a{SURROGATE}b", "", "\0", "\x1b[2J", "a\nb", "../..", "%s{}", "x" * 300])


ANY: tuple[Draw, ...] = (long_text, number, wrong_array, distinct_array, wide_object, deep, text_beside)
