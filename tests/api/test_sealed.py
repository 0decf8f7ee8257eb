"""Reasoning that travels through the client unread."""

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.api.sealed import seal, unseal


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_what_was_sealed_is_unsealed(text: str) -> None:
    assert unseal(seal(text)) == text
    assert seal(text).isascii() and '"' not in seal(text)


BAD_UTF8 = "vllm-mlx.1." + base64.urlsafe_b64encode(zlib.compress(b"\xff")).decode()


@pytest.mark.parametrize("word", ["", "vllm-mlx", "vllm-mlx.1.", "vllm-mlx.1.%%", "vllm-mlx.1.AAAA", BAD_UTF8])
def test_any_other_word_is_none(word: str) -> None:
    assert not unseal(word)


def test_a_small_word_does_not_unpack_to_all_of_the_memory() -> None:
    text = unseal(seal("x" * 20_000_000))
    assert text is not None and len(text) == 16 * 1024 * 1024
