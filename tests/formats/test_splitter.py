"""Markers in a growing text."""

from vllm_mlx.formats.vocabulary import MarkerSplitter


def test_first_marker_is_found() -> None:
    assert MarkerSplitter(["<b>", "<a>"]).cut("x<c><a><b>") == (4, "<a>")


def test_possible_marker_is_held_back() -> None:
    splitter = MarkerSplitter(["<think>"])
    assert splitter.cut("a <thi") == (2, None)
    assert splitter.cut("a <thing") == (8, None)
    assert splitter.cut("a <<") == (3, None)


def test_nothing_is_held_of_a_final_text() -> None:
    assert MarkerSplitter(["<think>"]).cut("a <thi", final=True) == (6, None)


def test_longer_marker_wins_over_its_beginning() -> None:
    splitter = MarkerSplitter(["<a", "<ab>"])
    assert splitter.cut("<a") == (0, None)
    assert splitter.cut("<a", final=True) == (0, "<a")
    assert splitter.cut("<ac") == (0, "<a")
    assert splitter.cut("<ab>") == (0, "<ab>")


def test_without_markers_all_is_safe() -> None:
    assert MarkerSplitter([]).cut("a<b>") == (4, None)
