"""Grammar text becomes matchers: once for each text, within bounds, over all that the tokenizer calls a tag."""

import json

import numpy as np
import pytest

from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.parsers.grammars.json_schema import MAX_SCHEMA_DEPTH, checked_schema
from vllm_mlx.processing import grammar
from vllm_mlx.processing.grammar import GrammarCompiler

from ..guided.walks import speaker


def lark(start: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: {start}"}]})


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(speaker().tokenizer, 1100)


def test_a_grammar_is_compiled_once(compiler) -> None:
    first = compiler.compile(lark('"a"'), "x")
    assert compiler.compile(lark('"a"'), "x") is first
    compiler.compile(lark('"b"'), "x")
    assert compiler.num_compiled == 2


def test_what_was_used_last_is_kept(compiler, monkeypatch) -> None:
    monkeypatch.setattr(grammar, "_MAX_COMPILED", 2)
    first = compiler.compile(lark('"a"'), "x")
    compiler.compile(lark('"b"'), "x")
    assert compiler.compile(lark('"a"'), "x") is first
    compiler.compile(lark('"c"'), "x")
    assert compiler.compile(lark('"a"'), "x") is first
    assert compiler.num_compiled == 3
    compiler.compile(lark('"b"'), "x")
    assert compiler.num_compiled == 4


def test_text_never_holds_a_tag(compiler) -> None:
    """Qwen's tokenizers do not call `<tool_call>` special, and llguidance would take it for text."""
    matcher = compiler.compile(lark("/(?s:.*)/"), "x").deep_copy()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    tokenizer = speaker().tokenizer
    for tag in tokenizer.marker_tokens:
        token = tokenizer.token_id(tag)
        assert bits[token] == (token in tokenizer.eos_token_ids)
    assert compiler.mask_words == 35
    assert not bits[tokenizer.vocab_size :].any()  # the model's last ids have no text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/[/", "unclosed character class"),
        ("/(?=a)b/", "look-around"),
        ("nothing", "unknown"),
    ],
)
def test_what_is_no_grammar_is_refused_by_its_field(compiler, text: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as caught:
        compiler.compile(lark(text), "structured_outputs.grammar")
    assert caught.value.param == "structured_outputs.grammar"
    assert "1 |" not in caught.value.message


def test_a_grammar_that_is_too_large_is_not_even_read(compiler, monkeypatch) -> None:
    monkeypatch.setattr(grammar, "MAX_GRAMMAR_CHARS", 100)
    with pytest.raises(InvalidParameter, match="too large"):
        compiler.compile(lark(" ".join(['"a"'] * 50)), "x")


def test_a_schema_as_deep_as_a_well() -> None:
    schema: object = {}
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        schema = {"items": schema}
    with pytest.raises(InvalidParameter, match="deeper than"):
        checked_schema(schema, "schema")


def test_keywords_are_looked_for_in_schemas_alone() -> None:
    schema = {"properties": {"not": {"enum": [{"if": 1}], "default": {"contains": 2}}}, "uniqueItems": False}
    assert checked_schema(schema, "schema") == {"properties": schema["properties"]}
