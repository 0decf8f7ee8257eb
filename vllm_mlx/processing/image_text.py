"""What stands for images in a rendered conversation. Works on texts; knows neither pictures nor ids."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_ESCAPED = "\uf8ff\ue000\uf8ff"  # private characters: a marker that is text of the conversation


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    image_starts: tuple[int, ...] = ()  # characters, in order


def hide_markers(value: Any, marker: str) -> Any:
    """The same strings, lists and dicts without the marker in any text, so that all the template writes are images."""
    match value:
        case str():
            return value.replace(marker, _ESCAPED)
        case dict():
            return {name: hide_markers(item, marker) for name, item in value.items()}
        case list():
            return [hide_markers(item, marker) for item in value]
        case _:
            return value


def fill_in(text: str, marker: str, images: Sequence[str]) -> Rendered | None:
    """Put each image's own text in place of its marker. None where there are not as many markers as images."""
    first, *rest = (part.replace(_ESCAPED, marker) for part in text.split(marker))
    if len(rest) != len(images):
        return None
    return _joined(first, zip(images, rest, strict=True))


def _joined(first: str, pairs: Iterable[tuple[str, str]]) -> Rendered:
    parts, starts, length = [first], [], len(first)
    for image, part in pairs:
        starts.append(length)
        parts += [image, part]
        length += len(image) + len(part)
    return Rendered("".join(parts), tuple(starts))
