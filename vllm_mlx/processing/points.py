"""Where a prompt is worth keeping for later ones. Asks the template by rendering, so its quirks cannot fool it."""

from collections.abc import Iterator, Sequence

from ..core.errors import TemplateError
from ..core.request import Request
from .encoded import Encoded
from .probes import with_next_turn, without_conversation
from .template import ChatTemplate

Point = tuple[int, int]  # (characters, tokens)


class SnapshotPoints:
    def __init__(self, template: ChatTemplate):
        self._template = template

    def plan(self, request: Request, encoded: Encoded) -> tuple[Point, ...]:
        """The ends of tools + system and of the conversation before the generation suffix, inside the prompt.

        `encoded` is the request's prompt. A point that the template lets nobody ask for is left out.
        """
        points = {self._common(probes, encoded) for probes in self._probes(request)}
        return tuple(sorted(point for point in points if point and 0 < point[1] < len(encoded.token_ids)))

    def _probes(self, request: Request) -> Iterator[Sequence[Request]]:
        yield from without_conversation(request)
        yield from with_next_turn(request)

    def _common(self, probes: Sequence[Request], encoded: Encoded) -> Point | None:
        """What all of the probes have in common with the prompt."""
        try:
            return encoded.before_space(min(encoded.common(self._template.render(probe)) for probe in probes))
        except TemplateError:
            return None
