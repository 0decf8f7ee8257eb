"""Token by token, the text is what decoding all at once gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mlx.formats.tokenizer import Detokenizer, Piece, Tokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[list[Piece]]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.finish()]


def text_of(steps: list[list[Piece]]) -> str:
    return "".join(piece.text for step in steps for piece in step)


TEXTS = ["The quick fox", "été 東京 🙂🙂 ñ", " leading", "  two", "a\n\n  b", "👩‍👩‍👧 family", "\ufffd x \ufffd"]


@pytest.mark.parametrize("text", TEXTS)
def test_equal_to_decoding_all(any_tokenizer: Tokenizer, text: str) -> None:
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    assert text_of(pieces_of(any_tokenizer, ids)) == any_tokenizer.decode(ids) == text


@pytest.mark.parametrize("prompt", ["The", "<think>\n", "東京", "fox 🙂", "x\n"])
@pytest.mark.parametrize("text", TEXTS)
def test_reply_continues_its_prompt(any_tokenizer: Tokenizer, prompt: str, text: str) -> None:
    before = any_tokenizer.encode(prompt, add_special_tokens=False)
    after = any_tokenizer.encode(text, add_special_tokens=False)
    whole = any_tokenizer.decode([*before, *after])
    assert any_tokenizer.decode(before) + text_of(pieces_of(any_tokenizer, after, before)) == whole


def test_leading_space_of_a_reply_is_kept(llama: Tokenizer) -> None:
    fox = llama.encode("fox", add_special_tokens=False)
    prompt = llama.encode("The", add_special_tokens=False)
    assert text_of(pieces_of(llama, fox, prompt)) == " fox"


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(max_size=4))
def test_any_text_comes_out_again(qwen: Tokenizer, text: str, prompt: str) -> None:
    ids = qwen.encode(text, add_special_tokens=False)
    before = qwen.encode(prompt, add_special_tokens=False)
    assert text_of(pieces_of(qwen, ids, before)) == text


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_ids_give_all_their_tokens_and_no_error(qwen: Tokenizer, llama: Tokenizer, data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from([qwen, llama]))
    ids = data.draw(st.lists(st.integers(-2, tokenizer.vocab_size + 5), max_size=60))
    steps = pieces_of(tokenizer, ids, ids[::-1])
    assert sum(piece.num_tokens for step in steps for piece in step) == len(ids)


def test_unfinished_character_is_held_back(qwen: Tokenizer) -> None:
    ids = [qwen.encode("x", add_special_tokens=False)[0], *_bytes(qwen, "🦊".encode())]
    assert pieces_of(qwen, ids) == [[Piece("x", 1)], [], [], [], [Piece("🦊", 4)], []]
    assert text_of(pieces_of(qwen, ids[:-1])) == "x\ufffd"


def test_garbage_is_not_held_for_ever(qwen: Tokenizer) -> None:
    steps = pieces_of(qwen, _bytes(qwen, b"\x80") * 100)
    assert sum(bool(step) for step in steps) > 4
    assert set(text_of(steps)) == {"\ufffd"}


def test_added_tokens_are_pieces_of_their_own(qwen: Tokenizer) -> None:
    ids = qwen.encode("x<think>\n<|im_end|>", add_special_tokens=False)
    unfinished = _bytes(qwen, b"\xe6")
    steps = pieces_of(qwen, [*unfinished, *ids[1:]])
    assert steps == [
        [],
        [Piece("\ufffd", 1), Piece("<think>", 1, special=True)],
        [Piece("\n", 1)],
        [Piece("<|im_end|>", 1, special=True, control=True)],
        [],
    ]


def _bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    token_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [token_of[bytes([byte])] for byte in data]
