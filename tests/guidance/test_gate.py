"""When thoughts end, by ids: at any offset of a delta, over deltas, once for all, at a flat cost."""

import time
from collections.abc import Sequence

import pytest

from tests.rows import row
from vllm_mlx.guidance.gate import ReasoningGate, TextGate, TokenGate, make_gate

THINK, END, CALL = 100, 101, 102
SPECIAL = {"<think>": THINK, "</think>": END, "<tool_call>": CALL, "<|channel|>": 103, "<|message|>": 104}


def encode(text: str) -> list[int]:
    """A token for each special text, and one for each character."""
    ids: list[int] = []
    while text:
        token = next((token for token in SPECIAL if text.startswith(token)), None)
        ids.append(SPECIAL[token] if token is not None else 1000 + ord(text[0]))
        text = text[len(token) if token is not None else 1 :]
    return ids


def decode(ids: Sequence[int]) -> str:
    names = {token_id: token for token, token_id in SPECIAL.items()}
    return "".join(names.get(token_id) or chr(token_id - 1000) for token_id in ids)


def gate(reasoning: str, tools: str | None = None) -> ReasoningGate:
    return make_gate(reasoning, token_id=SPECIAL.get, encode=encode, decode=decode, tools=tools)


@row("S2-3")
def test_end_at_any_offset_of_a_delta() -> None:
    for offset in range(4):
        delta = [1, 2, 3, 4]
        delta[offset] = END
        one = gate("qwen3")
        assert isinstance(one, TokenGate)
        assert one.is_reasoning_end_streaming([THINK, *delta], delta)
        assert one.num_free == offset + 1


@row("S2-5")
def test_ended_is_ended() -> None:
    one = gate("qwen3")
    assert not one.is_reasoning_end_streaming([], [THINK, 1])
    assert one.is_reasoning_end_streaming([], [END])
    assert one.is_reasoning_end_streaming([], [THINK])
    assert one.num_free == 0


@row("S2-6", "S2-8")
def test_last_tag_decides_about_a_prompt() -> None:
    one = gate("qwen3")
    assert one.is_reasoning_end([THINK, 1, END, 2])
    assert not one.is_reasoning_end([THINK, 1, END, 2, THINK])
    assert not one.is_reasoning_end([1, 2])


@row("S2-6")
def test_tags_of_earlier_turns_do_not_count() -> None:
    one = TokenGate([(THINK,)], [(END,)], turn_ids=frozenset({7}))
    assert one.last_tag_ends([THINK, END, 7, 1]) is None
    assert one.last_tag_ends([7, THINK]) is False
    assert one.is_reasoning_end([7, THINK, END])


def test_a_call_ends_thoughts_where_its_tag_is_a_token() -> None:
    assert gate("qwen3", "hermes").is_reasoning_end_streaming([], [THINK, 1, CALL])
    assert not gate("qwen3").is_reasoning_end_streaming([], [THINK, 1, CALL])


@row("S2-4")
@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_an_end_of_several_tokens_over_deltas(size: int) -> None:
    text = "<|channel|>analysis<|message|>hm<|channel|>final<|message|>"
    ids = encode(text)
    one = gate("openai_gptoss")
    assert isinstance(one, TokenGate)
    seen = [
        one.is_reasoning_end_streaming(ids[: end + size], ids[end : end + size]) for end in range(0, len(ids), size)
    ]
    assert seen == [False] * (len(seen) - 1) + [True]
    assert one.is_reasoning_end(ids)
    assert not one.is_reasoning_end(ids[:-1])


@row("S2-10")
def test_tags_that_are_plain_text_are_found_in_text() -> None:
    one = gate("granite")
    assert isinstance(one, TextGate)
    ids = encode("Here is my thought process: hm. Here is my response: 1")
    states = [one.is_reasoning_end_streaming(ids[: end + 1], [ids[end]]) for end in range(len(ids))]
    assert states.index(True) == len(ids) - 3
    assert one.is_reasoning_end(ids)
    assert not one.is_reasoning_end(ids[:30])


@row("S2-1")
def test_a_gate_without_a_fast_path_looks_at_all_ids() -> None:
    class Plain(ReasoningGate):
        def is_reasoning_end(self, ids: Sequence[int]) -> bool:
            return END in ids

    assert Plain().is_reasoning_end_streaming([END, 1], [1])


@row("S2-2")
@pytest.mark.parametrize("reasoning", ["qwen3", "openai_gptoss", "granite"])
def test_cost_of_a_step_does_not_grow(reasoning: str) -> None:
    def seconds(num_history: int) -> float:
        one = gate(reasoning)
        history = encode("a") * num_history
        start = time.process_time()
        for _ in range(300):
            one.is_reasoning_end_streaming(history, history[-1:])
        return time.process_time() - start

    short, long = (min(seconds(length) for _ in range(3)) for length in (1_000, 300_000))
    assert long < 20 * short + 0.01  # 300 times where the cost grows
