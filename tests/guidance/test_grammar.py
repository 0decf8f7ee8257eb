"""Grammar text becomes matchers: once for each text, within bounds, over all that the tokenizer calls a tag."""

import json
import resource
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.rows import cases
from vllm_mlx.core.errors import InvalidParameter, Overloaded
from vllm_mlx.guidance import grammar_compiler
from vllm_mlx.guidance.grammar_compiler import CompiledGrammars, GrammarCompiler
from vllm_mlx.guidance.grammars.json_schema import MAX_SCHEMA_DEPTH, checked_schema
from vllm_mlx.guidance.grammars.lark import literal

from .random_sampler import sampler


def lark(start: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: {start}"}]})


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(sampler().tokenizer, 1100)


def test_a_grammar_is_compiled_once(compiler) -> None:
    first = compiler.compile(lark('"a"'), "x")
    assert compiler.compile(lark('"a"'), "x") is first
    compiler.compile(lark('"b"'), "x")
    assert compiler.num_compiled == 2


def test_keys_share_no_compiled_grammar(compiler) -> None:
    first = compiler.compile(lark('"a"'), "x", "ann")
    assert compiler.compile(lark('"a"'), "x", "ben") is not first
    assert compiler.num_compiled == 2
    assert compiler.compile(lark('"a"'), "x", "ann") is first


def test_what_every_trial_takes_is_not_counted_for_its_grammar() -> None:
    compiler = GrammarCompiler(sampler().tokenizer, 1100, max_bytes=60 << 20)
    first = compiler.compile(lark('"first"'), "x")
    for number in range(30):
        matcher(compiler, number)
    assert compiler.compile(lark('"first"'), "x") is first, "31 small grammars take less than 2 MB each"


def matcher(compiler, number: int):
    return compiler.compile(lark(f'"{number:03}"'), "x")


def test_what_was_used_last_is_kept(compiler) -> None:
    held = CompiledGrammars(2)
    held.put(("ann", "a"), matcher(compiler, 1), 100)
    held.put(("ann", "b"), matcher(compiler, 2), 100)
    assert held.get(("ann", "a")) is not None
    held.put(("ann", "c"), matcher(compiler, 3), 100)
    assert held.get(("ann", "a")) is not None and held.get(("ann", "b")) is None


def test_a_key_takes_no_grammars_from_keys_that_hold_fewer(compiler) -> None:
    held = CompiledGrammars(8)
    for number in range(3):
        held.put(("ben", f"{number}"), matcher(compiler, number), 10_000)
    for number in range(20):
        held.put(("ann", f"{number}"), matcher(compiler, number), 100)
    assert all(held.get(("ben", f"{number}")) is not None for number in range(3))
    assert sum(held.get(("ann", f"{number}")) is not None for number in range(20)) == 5


def test_long_grammars_take_more_of_the_room(compiler) -> None:
    held = CompiledGrammars(8, 1000)
    held.put(("ben", "short"), matcher(compiler, 0), 5)
    for number in range(3):
        held.put(("ann", f"{number}" * 600), matcher(compiler, number), 600)
    assert held.get(("ben", "short")) is not None and held.get(("ann", "2" * 600)) is not None
    assert held.get(("ann", "1" * 600)) is None
    held.put(("ann", "9" * 5000), matcher(compiler, 1), 5000)  # longer than all may be together: it is not kept
    assert held.get(("ann", "9" * 5000)) is None and held.get(("ben", "short")) is not None


def test_definitions_that_refer_to_each_other_in_a_long_chain_are_compiled(compiler) -> None:
    """llguidance follows them by recursion: on a thread's usual stack this ends the process."""
    rules = "\n".join(f'r{number}: "a" r{number + 1}' for number in range(6000))
    text = json.dumps({"grammars": [{"lark_grammar": f'start: r0\n{rules}\nr6000: "b"'}]})
    assert compiler.compile(text, "x").deep_copy().try_consume_tokens([]) == 0


ODD = {
    "empty alternatives": r"/%s/" % ("(|a)" * 20_000),
    "alternatives that may be empty": r"/%s/" % ("(a|b|)" * 12_000),
    "optional literals": '"a"? ' * 20_000 + '"b"',
    "an empty terminal": "T\nT: " + '("a"|E) ' * 20_000 + '\nE: ""',
    "terminals that double": "T13\nT0: \"a\"?\n" + "\n".join(f"T{n + 1}: T{n} T{n}" for n in range(13)),
    "nested counts": "/((((a{100}){100}){100}){100})/",
    "nested counts by terminals": 'A{100}\nA: B{100}\nB: C{100}\nC: "a"{100}',
    "a long literal": f'"{"a" * 200_000}"',
    "rules that may be empty": "a? " * 5000 + '\na: "x"?',
    "many divisors": '%json {"prefixItems": [' + ", ".join(
        f'{{"type": "integer", "multipleOf": {99_991 + n}}}' for n in range(50)
    ) + "]}",
}  # fmt: skip


QUICK = {"empty alternatives", "nested counts", "a long literal", "rules that may be empty"}


@pytest.mark.parametrize("name", cases(ODD, QUICK))
def test_a_grammar_that_costs_too_much_is_refused_before_this_process_pays(compiler, name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(InvalidParameter, match=r"`x` cannot guide a reply: .* Make it simpler|too big") as caught:
        compiler.compile(lark(ODD[name]), "x")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert caught.value.param == "x" and compiler.num_compiled == 0
    assert after.ru_utime - before.ru_utime < 1
    compiler.compile(lark('"a"'), "x")  # the next grammar is tried as if nothing had been


def test_a_process_that_is_killed_while_it_tries_is_the_servers_fault(compiler, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Overloaded) as caught:
        compiler.compile(lark('"a"'), "x")
    assert caught.value.retry_after_s > 0
    monkeypatch.undo()
    compiler.compile(lark('"a"'), "x")


def test_a_key_compiles_one_grammar_at_a_time_and_others_are_not_refused_for_it(compiler, monkeypatch) -> None:
    monkeypatch.setattr(grammar_compiler, "_WAIT_S", 0.05)
    slow = lark(r"/%s/" % ("(|a)" * 20_000))
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(compiler.compile, slow, "x", "ann") for _ in range(3)]
        compiler.compile(lark('"a"'), "x", "ben")
        faults = [type(one.exception()) for one in asked]
    assert faults.count(InvalidParameter) >= 1 and set(faults) <= {InvalidParameter, Overloaded}
    assert Overloaded in faults, "who finds no place may try again"


def test_a_grammar_that_takes_much_memory_is_compiled_again_for_each_request(compiler, monkeypatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_KEPT_BYTES", 1 << 20)
    grammar = lark(r"/%s/" % (r"\p{L}" * 2_000))
    first = compiler.compile(grammar, "x")
    assert compiler.compile(grammar, "x") is not first


def test_a_literal_may_contain_any_character(compiler) -> None:
    for char in map(chr, (*range(0x21), 0x22, 0x5C, 0x7F, 0x85, 0x2028, 0xFEFF, 0x1F600)):
        written = compiler.compile(lark(literal(char)), "x").deep_copy()
        ids = sampler().tokenizer.encode(char, add_special_tokens=False)
        assert written.try_consume_tokens(ids) == len(ids) and written.is_accepting(), hex(ord(char))


def test_text_never_holds_a_tag(compiler) -> None:
    """Qwen's tokenizers do not call `<tool_call>` special, and llguidance would take it for text."""
    matcher = compiler.compile(lark("/(?s:.*)/"), "x").deep_copy()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    tokenizer = sampler().tokenizer
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
    monkeypatch.setattr(grammar_compiler, "MAX_GRAMMAR_CHARS", 100)
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
