"""Grammar text becomes matchers: once for each text, within bounds, over all that the tokenizer calls a tag."""

import json
import threading
import time
import weakref

import numpy as np
import pytest

from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.guidance import grammar_compiler
from vllm_mlx.guidance.grammar_compiler import MAX_OPTIONAL, CompiledGrammars, CompileThreads, GrammarCompiler
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


def matcher(compiler, number: int):
    return compiler.compile(lark(f'"{number:03}"'), "x")


def test_what_was_used_last_is_kept(compiler) -> None:
    held = CompiledGrammars(2)
    held.add("ann", "a", matcher(compiler, 1))
    held.add("ann", "b", matcher(compiler, 2))
    assert held.get("ann", "a") is not None
    held.add("ann", "c", matcher(compiler, 3))
    assert held.get("ann", "a") is not None and held.get("ann", "b") is None


def test_a_key_takes_no_grammars_from_keys_that_hold_fewer(compiler) -> None:
    held = CompiledGrammars(8)
    for number in range(3):
        held.add("ben", f"{number}", matcher(compiler, number))
    for number in range(50):
        held.add("ann", f"{number}", matcher(compiler, number))
    assert all(held.get("ben", f"{number}") is not None for number in range(3))
    assert sum(held.get("ann", f"{number}") is not None for number in range(50)) == 5


def test_long_grammars_take_more_of_the_room(compiler) -> None:
    held = CompiledGrammars(8, 1000)
    held.add("ben", "short", matcher(compiler, 0))
    for number in range(3):
        held.add("ann", f"{number}" * 600, matcher(compiler, number))
    assert held.get("ben", "short") is not None and held.get("ann", "2" * 600) is not None
    assert held.get("ann", "1" * 600) is None
    held.add("ann", "9" * 5000, matcher(compiler, 1))  # longer than all may be together: it is not kept
    assert held.get("ann", "9" * 5000) is None and held.get("ben", "short") is not None


def test_definitions_that_refer_to_each_other_in_a_long_chain_are_compiled(compiler) -> None:
    """llguidance follows them by recursion: on a thread's usual stack this ends the process."""
    rules = "\n".join(f'r{number}: "a" r{number + 1}' for number in range(6000))
    text = json.dumps({"grammars": [{"lark_grammar": f'start: r0\n{rules}\nr6000: "b"'}]})
    assert compiler.compile(text, "x").deep_copy().try_consume_tokens([]) == 0


def test_a_grammar_that_takes_too_long_is_waited_for_no_longer() -> None:
    threads, done = CompileThreads(num_threads=1, limit_s=0.01), threading.Event()
    with pytest.raises(TimeoutError):
        threads.run(done.wait)
    with pytest.raises(TimeoutError):  # its thread is not free before it ends
        threads.run(lambda: 1)
    done.set()
    patient = CompileThreads(num_threads=1, limit_s=60)
    assert [patient.run(lambda: 1), patient.run(lambda: 2)] == [1, 2]
    with pytest.raises(ValueError, match="not this"):
        patient.run(lambda: int("not this"))


def test_a_grammar_that_is_given_up_is_the_clients_error(compiler, monkeypatch) -> None:
    monkeypatch.setattr(compiler, "_threads", CompileThreads(num_threads=0, limit_s=0))
    with pytest.raises(InvalidParameter, match="to compile as a grammar"):
        compiler.compile(lark('"a"'), "x")


def test_a_grammar_that_is_made_too_late_is_kept_by_nobody() -> None:
    class Made:
        """It takes weak references."""

    threads, go, made = CompileThreads(num_threads=1, limit_s=0.01), threading.Event(), [Made()]
    found = weakref.ref(made[0])

    def work() -> Made:
        go.wait()
        return made.pop()

    with pytest.raises(TimeoutError) as raised:
        threads.run(work)
    go.set()
    while not threads._free.acquire(timeout=0.01):  # a hang ends the test
        pass
    while found() is not None:
        time.sleep(0.001)
    assert raised.value.__traceback__ is not None, "an error that is still held does not keep it either"


def test_optional_pieces_of_a_regular_expression_are_bounded(compiler) -> None:
    """They take memory with the square of their number: 29,000 took 1.7 GB."""
    compiler.compile(lark(f"/{'a?' * MAX_OPTIONAL}/ s\ns: " + '"?" ' * (MAX_OPTIONAL + 1)), "x")
    for piece in ("a?", "(a|a)*", "a{0,2}", "a{,2}"):
        with pytest.raises(InvalidParameter, match=f"`x` has a regular expression with more than {MAX_OPTIONAL}"):
            compiler.compile(lark(f'"/" /{piece * (MAX_OPTIONAL + 1)}/'), "x")


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
