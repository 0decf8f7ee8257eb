"""Usual schemas are served with a vocabulary of 262,144 tokens, within the limits that refuse hostile grammars."""

import json
import random
from functools import cache
from itertools import product
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import pytest

from tests.support.named_formats import required_calls
from tests.support.rows import cases
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.messages import ToolSpec
from vllm_mlx.core.request import Guide, JsonSchema
from vllm_mlx.formats.family import NO_HEADER
from vllm_mlx.guidance.grammars import GuidedTool, guide_grammar

from .random_sampler import RandomSampler
from .scripted import with_tokens

TEXT: Any = {"type": "string"}
DEEP: Any = {"type": "integer"}
for level in range(8):
    DEEP = {"anyOf": [DEEP, {"type": "object", "properties": {f"k{level}": DEEP}}, {"type": "null"}]}
PATTERNS = {"a": r"^[A-Z]{2}-\d{4}$", "b": r"^[\w.-]+@[\w-]+\.\w+$", "c": r"^(https?://)?[a-z0-9.-]{1,64}(/\S*)?$"}
BENIGN: dict[str, Any] = {
    "450 optional texts": {"type": "object", "properties": {f"option_{n}": TEXT for n in range(450)}},
    "450 optional integers": {"type": "object", "properties": {f"n{n}": {"type": "integer"} for n in range(450)}},
    "a long enum": {"enum": [f"value number {n}" for n in range(10_000)]},
    "patterns": {
        "type": "object",
        "properties": {key: {"type": "string", "pattern": pattern} for key, pattern in PATTERNS.items()},
        "required": [*PATTERNS],
    },
    "alternatives": DEEP,
    "any object": {"type": "object"},
    "a long text": {"type": "object", "properties": {"t": {"type": "string", "maxLength": 5000}}, "required": ["t"]},
}
HOSTILE = {
    "nested counts": "/((((a{100}){100}){100}){100})/",
    "empty alternatives": r"/%s/" % ("(|a)" * 20_000),
    "terminals that double": "T13\nT0: \"a\"?\n" + "\n".join(f"T{n + 1}: T{n} T{n}" for n in range(13)),
}  # fmt: skip


@cache
def large() -> RandomSampler:
    """Words of one to four letters in three spellings, numbers, and runs of signs, as in vocabularies of this size."""
    words = ["".join(letters) for size in (2, 3) for letters in product(ascii_lowercase, repeat=size)]
    draw = random.Random(0)
    words += {"".join(draw.choices(ascii_lowercase, k=draw.randint(4, 9))) for _ in range(90_000)}
    signs = ["".join(found) for size in (2, 3, 4) for found in product('"{}[]:,_.-/', repeat=size)]
    numbers = [str(number) for number in range(10, 1000)]
    capitals = ["".join(letters) for letters in product(ascii_uppercase, repeat=3)]
    texts = [*signs, *numbers, *capitals, *words, *(f"Ġ{word}" for word in words), *(f'"{word}' for word in words)]
    one = with_tokens(*dict.fromkeys(texts[: 262_144 - 1000]))
    assert one.tokenizer.vocab_size > 260_000
    return one


def follow(grammar: str, seed: int) -> None:
    """Draw up to forty tokens, each as likely."""
    one, draw = large(), random.Random(seed)
    matcher = one.compiler.compile(grammar, "x").deep_copy()
    for _ in range(40):
        allowed = one.allowed(matcher)
        assert not matcher.is_error(), matcher.get_error()
        if not len(allowed) or matcher.is_stopped():
            break
        assert matcher.consume_token(int(draw.choice(allowed))), matcher.get_error()


@pytest.mark.parametrize("name", cases(BENIGN, ["450 optional texts", "patterns"]))
def test_usual_schemas_are_served(name: str) -> None:
    grammar = guide_grammar(Guide(form=JsonSchema(BENIGN[name])), large().writer())
    for seed in range(3):
        follow(grammar, seed)


@pytest.mark.parametrize("name", cases(["hermes", "qwen3_xml"], ["qwen3_xml"]))
def test_forced_calls_are_served(name: str) -> None:
    inner = {"type": "object", "properties": {f"option_{n}": {"type": ["string", "null"]} for n in range(40)}}
    schema = {"type": "object", "properties": {**inner["properties"], "inner": inner}, "required": ["inner"]}
    tools = [GuidedTool.of(ToolSpec(f"tool_{n}", None, schema), "tools", is_strict=True) for n in range(20)]
    grammar = required_calls(tools, name, large().writer(), NO_HEADER, None)
    for seed in range(3):
        follow(grammar, seed)


@pytest.mark.parametrize("name", cases(HOSTILE, ["nested counts"]))
def test_hostile_grammars_are_refused(name: str) -> None:
    with pytest.raises(InvalidParameter, match=r"`x` cannot guide a reply: .* Make it simpler"):
        large().compiler.compile(json.dumps({"grammars": [{"lark_grammar": f"start: {HOSTILE[name]}"}]}), "x")
