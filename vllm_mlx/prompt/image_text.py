"""What stands for images and videos in a rendered conversation. Works on texts; knows neither pictures nor ids."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_ESCAPED = ("\uf8ff\ue000\uf8ff", "\uf8ff\ue001\uf8ff")  # private characters: markers that are text of the conversation


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    image_starts: tuple[int, ...] = ()  # characters, in order


class Markers:
    """What a template writes for an image, and for a video where the model takes any."""

    def __init__(self, image: str, video: str | None = None):
        self.image = image
        self.video = video
        given = [marker for marker in (image, video) if marker is not None]
        self._escapes = list(zip(given, _ESCAPED, strict=False))
        self._split = re.compile(f"({'|'.join(map(re.escape, given))})")

    def hide(self, value: Any) -> Any:
        """The same strings, lists and dicts without a marker in any text, so that all the template writes are media."""
        match value:
            case str():
                return self._hidden(value)
            case dict():
                return {name: self.hide(item) for name, item in value.items()}
            case list():
                return [self.hide(item) for item in value]
            case _:
                return value

    def fill_in(self, text: str, media: Sequence[tuple[str, str]]) -> Rendered | None:
        """`media`: (marker, own text) of each, put in its marker's place. None where other markers stand there."""
        first, *rest = self._split.split(text)
        if rest[::2] != [marker for marker, _ in media]:
            return None
        own = [text for _, text in media]
        return _joined(self._shown(first), zip(own, map(self._shown, rest[1::2]), strict=True))

    def _hidden(self, text: str) -> str:
        for marker, escaped in self._escapes:
            text = text.replace(marker, escaped)
        return text

    def _shown(self, text: str) -> str:
        for marker, escaped in self._escapes:
            text = text.replace(escaped, marker)
        return text


def _joined(first: str, pairs: Iterable[tuple[str, str]]) -> Rendered:
    parts, starts, length = [first], [], len(first)
    for image, part in pairs:
        starts.append(length)
        parts += [image, part]
        length += len(image) + len(part)
    return Rendered("".join(parts), tuple(starts))
