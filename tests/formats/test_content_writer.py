"""Content of a reply: where it stood, what begins a line, and which tags in it are quoted."""

import pytest

from vllm_mlx.core.events import ContentEvent, TextDelta
from vllm_mlx.formats.content import ContentWriter, Quoting
from vllm_mlx.formats.vocabulary import TokenCodec


def test_made_text_stands_for_everything_since_the_last_text() -> None:
    writer = ContentWriter(TokenCodec(frozenset()), is_plain=True)
    out: list[ContentEvent] = []
    writer.position = 2
    writer.feed("Hi", out)
    writer.position = 9
    writer.begin_line(out)
    writer.feed_made("made", out)
    assert out == [TextDelta("Hi"), TextDelta("\n"), TextDelta("made")]
    assert writer.spans == [(0, 2), (2, 2), (2, 9)]


def test_a_message_of_its_own_begins_a_line() -> None:
    writer = ContentWriter(TokenCodec(frozenset()), is_plain=True)
    out: list[ContentEvent] = []
    for text in ("Hi", "you\n", "there"):
        writer.begins_message = True
        writer.feed(text, out)
    assert "".join(event.text for event in out if isinstance(event, TextDelta)) == "Hi\nyou\nthere"


@pytest.mark.parametrize(
    ("before", "is_quoted"),
    [
        ("", False),
        ("Write ", False),
        ("Write `", True),
        ("Write `a` and ", False),
        ("Write `a` and `", True),
        ("an odd ` mark\n", False),
        ('The "', True),
        ('He said "so"', False),
        ("users'", False),
        ("```\n", True),
        ("```\na\n```\n", False),
        ("  ```xml\na\n", True),
        ("~~~\na", True),
    ],
)
def test_a_tag_is_quoted_in_code_and_behind_a_quotation_mark(before: str, is_quoted: bool) -> None:
    for pieces in ([before], list(before)):
        quoting = Quoting()
        for piece in pieces:
            quoting.feed(piece)
        assert quoting.is_quoted is is_quoted


@pytest.mark.parametrize(
    ("before", "behind", "is_mentioned"),
    [
        ("Use ", " tags", True),
        ("Use ", ".", True),
        ("Use ", "\n{", False),
        ("Use ", " {", False),
        ("Use", " tags", False),
        ("", " tags", False),
        ("Use\n ", " tags", False),
    ],
)
def test_a_tag_between_words_is_mentioned(before: str, behind: str, is_mentioned: bool) -> None:
    quoting = Quoting()
    quoting.feed(before)
    assert quoting.is_mentioned(behind) is is_mentioned
