"""Where a prompt is worth keeping for later ones. Asks the template by rendering, so its quirks cannot fool it."""

from collections.abc import Iterable, Iterator, Sequence

from ..core.deadline import Deadline
from ..core.errors import TemplateError
from ..core.request import Request
from .encoded import Encoded
from .probes import before_last_question, with_more_said, with_next_turn, without_conversation
from .template import ChatTemplate
from .volatile import volatile_places

Point = tuple[int, int]  # (characters, tokens)

_NEAR = 8  # tokens: fewer are sooner computed again than a copy of recurrent state is held


class SnapshotPoints:
    def __init__(self, template: ChatTemplate):
        self._template = template

    def plan(self, request: Request, encoded: Encoded, deadline: Deadline | None = None) -> tuple[Point, ...]:
        """Where later prompts are likely to part from this one.

        The ends of tools + system, of the conversation before its last question, of what that says, and of all of it
        before the generation suffix; and where sessions of one agent part. `encoded` is the request's prompt. A point
        that the template lets nobody ask for is left out. Raises what the deadline raises.
        """
        points: set[Point | None] = set()
        for probes in self._probes(request):
            if deadline is not None:
                deadline.check()
            points.add(self._common(probes, encoded))
        points |= {encoded.before_space(encoded.boundary(place)) for place in volatile_places(request, encoded.text)}
        return tuple(_apart(sorted(point for point in points if point and 0 < point[1] < len(encoded.token_ids))))

    def _probes(self, request: Request) -> Iterator[Sequence[Request]]:
        yield from without_conversation(request)
        yield from before_last_question(request)
        yield from with_more_said(request)
        yield from with_next_turn(request)

    def _common(self, probes: Sequence[Request], encoded: Encoded) -> Point | None:
        """What all of the probes have in common with the prompt."""
        try:
            return encoded.before_space(min(encoded.common(self._template.render(probe)) for probe in probes))
        except TemplateError:
            return None


def _apart(points: Iterable[Point]) -> Iterator[Point]:
    """Without those that the one a few tokens before them serves as well."""
    last = -_NEAR
    for point in points:
        if point[1] - last >= _NEAR:
            last = point[1]
            yield point
