"""Where n-grams of a prompt occurred, beside a search through all positions."""

import random
import time

import numpy as np
import pytest

from vllm_mlx.cache.prompt_index import SIZES, PromptIndex, hashed


def ends(text: list[int], ngram: list[int]) -> list[int]:
    """The positions behind an n-gram at which the text goes on."""
    size = len(ngram)
    return [end for end in range(size, len(text)) if text[end - size : end] == ngram]


def searched(text: list[int], last: list[int], start: int | None) -> int | None:
    for size in SIZES:
        found = ends(text, last[-size:]) if len(last) >= size else []
        later = [end for end in found if start is not None and end >= start]
        if found:
            return min(later, default=max(found))
    return None


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8, 40])
def test_it_finds_what_a_search_finds(alphabet: int) -> None:
    rng = random.Random(alphabet)
    for _ in range(150):
        text = [rng.randrange(alphabet) for _ in range(rng.randrange(60))]
        index = PromptIndex(text)
        for _ in range(10):
            last = [rng.randrange(alphabet) for _ in range(rng.randrange(9))]
            if len(text) > 9 and rng.random() < 0.7:
                at = rng.randrange(len(text) - 8)
                last = text[at : at + rng.randrange(9)]
            start = rng.choice([None, rng.randrange(70)])
            assert index.find(last, start=start) == searched(text, last, start)
            assert index.find(last, (3,)) == searched(text, last[-3:], None)


def test_the_end_of_the_text_does_not_find_itself() -> None:
    assert PromptIndex([1, 2, 3]).find([1, 2, 3]) is None
    assert PromptIndex([1, 2, 3, 4]).find([1, 2, 3]) == 3


@pytest.mark.parametrize("text", [[], [7], [7, 7], [1 << 31, 5, (1 << 32) - 1, 5]], ids=str)
def test_texts_may_be_short_and_ids_large(text: list[int]) -> None:
    index = PromptIndex(text)
    assert index.find(text) is None
    assert index.find(text[:3]) == (3 if len(text) == 4 else None)


def test_ngrams_of_one_hash_are_told_apart() -> None:
    ids = np.random.default_rng(5).integers(0, 1 << 18, (3, 1 << 22), dtype=np.uint64)
    hashes = hashed(ids)
    order = np.argsort(hashes)
    pairs = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    twins = [[ids[:, order[pair + side]].tolist() for side in (0, 1)] for pair in pairs]
    twins = [(one, other) for one, other in twins if one != other]
    assert len(twins) > 2, "the test needs n-grams of one hash"
    for one, other in twins:
        assert PromptIndex([*one, 1]).find(other) is None
        both = PromptIndex([*one, 1, *other, 2, *one, 3])
        assert (both.find(one), both.find(other)) == (11, 7)
        assert (both.find(one, start=0), both.find(other, start=8)) == (3, 7)


def test_a_hundred_thousand_tokens_take_little_memory_and_time() -> None:
    rng = random.Random(1)
    text = tuple(min(150_000, int(rng.paretovariate(0.6))) for _ in range(100_000))
    seconds = []
    for _ in range(3):
        began = time.process_time()
        index = PromptIndex(text)
        seconds.append(time.process_time() - began)
    print(f"{min(seconds) * 1000:.0f} ms, {index.nbytes / len(text):.2f} bytes a token")
    assert index.nbytes <= 16 * len(text)
    assert index.token_ids is text
    assert index.find(text[50_000:50_006]) is not None
