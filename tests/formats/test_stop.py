"""Stop strings, at every cut."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mlx.core.request import MAX_STOP_STRINGS
from vllm_mlx.formats.stop import StopMatcher, _Search


def run(pieces: list[str], stop: list[str], **options: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stop, **options)
    shown = ""
    for piece in pieces:
        safe, match = matcher.feed(piece)
        shown += safe
        if match is not None:
            return shown, match
    return shown + matcher.finish(), None


def first_match(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By brute force: the shortest beginning of the text that ends in a stop string, and the longest such string."""
    for end in range(1, len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)], candidate
    return text, None


@pytest.mark.parametrize(
    ("text", "stop", "shown", "match"),
    [
        ("hello STOP world", ["STOP"], "hello ", "STOP"),
        ("hello STO world", ["STOP"], "hello STO world", None),
        ("a\n\nUser: b", ["User:", "\n\n"], "a", "\n\n"),
        ("abc", ["abc", "b"], "a", "b"),
        ("abc", ["c", "bc"], "a", "bc"),
        ("aaab", ["aab"], "a", "aab"),
        ("ends with ST", ["STOP"], "ends with ST", None),
        ("", ["x"], "", None),
    ],
)
def test_first_match_at_every_cut(text: str, stop: list[str], shown: str, match: str | None) -> None:
    for pieces in [[text], list(text), *([text[:i], text[i:]] for i in range(len(text)))]:
        assert run(pieces, stop) == (shown, match)


@settings(max_examples=500)
@given(
    st.lists(st.text("ab<", max_size=4), max_size=8),
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_equal_to_brute_force(pieces: list[str], stop: list[str]) -> None:
    assert run(pieces, stop) == first_match("".join(pieces), stop)


def test_only_what_may_become_a_match_is_held_back() -> None:
    matcher = StopMatcher(["STOP", "TO"])
    assert matcher.feed("xST") == ("x", None)
    assert matcher.feed("x") == ("STx", None)
    assert matcher.feed("T") == ("", None)


def test_match_is_shown_on_request() -> None:
    assert run(list("a STOP b"), ["STOP"], include_match=True) == ("a STOP", "STOP")


def test_a_stop_string_that_nearly_matches_everywhere_takes_linear_time() -> None:
    """Each step of the search is counted: there are at most two for each character."""
    search = _Search("a" * 500 + "z")
    steps = 0

    class Counted(str):
        def __getitem__(self, index: object) -> str:  # type: ignore[override]
            nonlocal steps
            steps += 1
            return super().__getitem__(index)  # type: ignore[index]

    search.stop = Counted(search.stop)
    text = ("a" * 499 + "b") * 20
    assert search.feed(text) is None
    assert steps <= 3 * len(text)


def test_a_piece_in_which_no_stop_string_begins_costs_the_same_for_any_number_of_them() -> None:
    """The calls of Python functions are counted, from a piece that could have continued a stop string on."""

    def num_calls(stop: list[str], pieces: list[str]) -> int:
        matcher, calls = StopMatcher(stop), 0
        assert matcher.feed("\n") == ("", None) and matcher.feed("x") == ("\nx", None)

        def count(frame: object, event: str, value: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            for piece in pieces:
                matcher.feed(piece)
        finally:
            sys.setprofile(None)
        return calls

    many = ["\n\n", *(f"<|{number}|>" for number in range(MAX_STOP_STRINGS - 1))]
    pieces = ["def ", "fox", "(a):", "    return"] * 100
    assert num_calls(many, pieces) == num_calls(many[:1], pieces) == len(pieces)
    assert run(["fox", "\n", "<|6", "2|", ">a"], many) == ("fox\n", "<|62|>")
