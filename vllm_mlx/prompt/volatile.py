"""Volatile places of a prompt: values in which the sessions of one agent differ. Knows no conversation and no template.

The patterns are those of values, with few words: prompts are written in many languages.
"""

import re
from collections.abc import Iterator

_MAX_SCANNED, _SLICE = 200_000, 10_000  # characters; between two slices, other threads get Python's lock
_MAX_LINE, _MAX_BACK = 100, 300  # characters of short lines before a value: its neighbours differ with it
_WORDS = 40  # characters of a long line before a value: a weekday, the name of a branch
# Every alternative begins with a literal or a set, so that most characters are passed without trying them all.
_VOLATILE = re.compile(
    r"""
    /(?<![\w.~/-]/)(?:[a-z]/|mnt/[a-z]/)?  # folders: absolute, with a drive, below the home folder
        (?:Users|home|root|private|tmp|var|Volumes|mnt|media|work(?:spaces?)?|opt|srv|data|app|src|code|repos?|projects?)
        /[\w./-]+
    | file:///[\w./-]+
    | :(?<=[A-Za-z]:)(?<![A-Za-z]{2}:)(?:\\{1,2}|/(?!/))\w[\w.\\/-]*
    | ~(?<!\w~)[/\\]\w[\w.\\/-]*
    | 20[23]\d(?<!\w\d{4})(?:([-/.]?)\d\d?\1\d\d?(?!\d)|年|(?!\w|[-.:/]\w))  # dates in digits, and years
    | \d(?<![\w.]\d)\d?([-/.])\d\d?\2(?:20)?[23]\d(?!\w)
    | \d(?<![\w:.]\d)\d:[0-5]\d(?![\w:]) | \d(?<![\w:.]\d)\d?:[0-5]\d(?::[0-5]\d|\ ?[AaPp]\.?[Mm]\b)  # times
    | 1[6-9]\d{8}(?<!\w.{10})(?:\d{3})?(?!\w)
    | -(?<=[0-9a-f]{8}-)(?:[0-9a-f]{4}-){3}[0-9a-f]{12}  # ids: UUID, commit, those with a prefix
    | [0-9a-f](?<![\w-].)(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{6,39}(?![\w-])
    | _(?<=[A-Za-z]_)(?=[A-Za-z]{0,30}\d)[A-Za-z0-9]{12,40}(?!\w)
    | \d(?<![0-9a-uw-zA-Z_.-]\d)\d{0,4}\.\d{1,5}\.\d{1,5}  # versions, addresses, names
    | @(?<=\w@)[\w-]{1,64}\.\w+
    | [Bb]ranch(?:\ name|\ is)?(?:["'`]?\s?[:=>`'"]\s?["'`]?|(?<=\b[Oo]n\ branch)\ )\w[\w./-]*
    | (?:[Uu]ser|[Hh]ost)[ _]?[Nn]ame["'`]?\s?[:=>]\s?["'`]?\w[\w.-]*
    | [Ss]ession[ _]?(?:[Ii][Dd]|[Nn]ame)["'`]?\s?[:=>]\s?["'`]?\w[\w.-]*
    """,
    re.VERBOSE,
)


def volatile_places(text: str, end: int) -> Iterator[int]:
    """Yield offsets in `text[:end]`: sessions are likely to share the text before one of them.

    A value that stands in the text several times counts once.
    """
    seen: set[str] = set()
    end = min(end, _MAX_SCANNED)
    for start in range(0, end, _SLICE):
        for found in _VOLATILE.finditer(text, start, min(end, start + _SLICE)):
            if found.group() not in seen:
                seen.add(found.group())
                yield _block_start(text, found.start())


def _block_start(text: str, value: int) -> int:
    """Return the start of the short lines up to a value; in a long line, the start of a word a little before it."""
    place = value
    while place and place - (line := text.rfind("\n", 0, place - 1) + 1) <= _MAX_LINE and value - line <= _MAX_BACK:
        place = line
    if place == value and (space := text.find(" ", max(0, value - _WORDS), value)) >= 0:
        return space
    return place
