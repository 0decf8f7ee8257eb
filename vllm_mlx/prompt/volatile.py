"""Where the first prompts of an agent's sessions part: at what names a place or a day. Knows texts, no template."""

import re
from collections.abc import Iterator

from ..core.messages import TextPart
from ..core.request import Request

MAX_PLACES = 3
MIN_GAP = 1000  # characters between places: about what a copy of recurrent state is worth
_CONTEXT = 32  # characters before a place by which it is found again in the rendered prompt
# The absolute path of somebody's folder, or a date: working directories, memory files, "today is".
_VARYING = re.compile(
    r"(?<![\w./~-])/(?:Users|home|root|private|tmp|var|Volumes|mnt|workspaces?)/[\w.-]+|\b\d{4}-\d{2}-\d{2}\b"
)


def volatile_places(request: Request, text: str) -> list[int]:
    """Offsets in the request's rendered `text`, ascending, before which sessions of one agent are likely the same."""
    places: list[int] = []
    for before, found in _varying(request):
        start = text.find(before + found, places[-1] if places else 0)
        if start < 0 or (places and start + len(before) < places[-1] + MIN_GAP):
            continue
        places.append(start + len(before))
        if len(places) == MAX_PLACES:
            break
    return places


def _varying(request: Request) -> Iterator[tuple[str, str]]:
    """What varies in the messages before the first reply, and the text before it."""
    assert request.messages is not None
    for message in request.messages:
        if message.role == "assistant":
            return
        for part in message.parts:
            if isinstance(part, TextPart):
                for match in _VARYING.finditer(part.text):
                    yield part.text[max(0, match.start() - _CONTEXT) : match.start()], match.group()
