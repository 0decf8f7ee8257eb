"""Reasoning that travels through the client unread."""

import base64
import random
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.api.text import FREE_BYTES, MAX_RATIO, MAX_UNSEALED_BYTES, Unsealer, seal
from vllm_mlx.core.errors import InvalidParameter

from .anthropic.bodies import decode as decode_messages
from .responses.bodies import decode as decode_response


def random_text(num_chars: int) -> str:
    """Text that unpacks to little more than it was."""
    return random.Random(0).randbytes(num_chars // 2).hex()


def unseal(word: str) -> str | None:
    return Unsealer().unseal(word, "messages")


def messages_of(word: str, number: int) -> Any:
    turn = {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": word}]}
    return {"messages": [turn] * number}


def responses_of(word: str, number: int) -> Any:
    return {"input": [{"type": "reasoning", "encrypted_content": word}] * number}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_what_was_sealed_is_unsealed(text: str) -> None:
    assert unseal(seal(text)) == text
    assert seal(text).isascii() and '"' not in seal(text)


BAD_UTF8 = "vllm-mlx.1." + base64.urlsafe_b64encode(zlib.compress(b"\xff")).decode()


@pytest.mark.parametrize("word", ["", "vllm-mlx", "vllm-mlx.1.", "vllm-mlx.1.%%", "vllm-mlx.1.AAAA", BAD_UTF8])
def test_any_other_word_is_none(word: str) -> None:
    assert not unseal(word)


def test_the_words_of_one_request_unpack_to_a_bounded_length() -> None:
    unsealer, half = Unsealer(), seal(random_text(MAX_UNSEALED_BYTES // 2))
    for _ in range(2):
        assert len(unsealer.unseal(half, "a") or "") == MAX_UNSEALED_BYTES // 2
    with pytest.raises(InvalidParameter, match=str(MAX_UNSEALED_BYTES)):
        unsealer.unseal(seal("x"), "a")


def test_a_short_word_does_not_unpack_to_a_long_text() -> None:
    assert len(unseal(seal("x" * FREE_BYTES)) or "") == FREE_BYTES
    with pytest.raises(InvalidParameter, match=f"{MAX_RATIO} times the sent bytes"):
        unseal(seal("x" * (FREE_BYTES + 1)))


def test_long_words_pay_for_short_ones() -> None:
    unsealer = Unsealer()
    text = random_text(FREE_BYTES)
    assert unsealer.unseal(seal(text), "a") == text
    assert len(unsealer.unseal(seal("x" * 4 * FREE_BYTES), "a") or "") == 4 * FREE_BYTES


@pytest.mark.parametrize(("decoder", "body"), [(decode_messages, messages_of), (decode_response, responses_of)])
def test_sealed_reasoning_of_a_whole_conversation_is_bounded(decoder: Any, body: Any) -> None:
    word = seal(random_text(MAX_UNSEALED_BYTES // 3))
    decoder(**body(word, 3))
    with pytest.raises(InvalidParameter, match="Leave out the reasoning of earlier turns"):
        decoder(**body(word, 4))
