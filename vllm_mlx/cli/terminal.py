"""What models, servers and files say, made safe for a terminal: their text may hold control sequences."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0, DEL and C1 begin every sequence that moves the cursor, sets the clipboard or renames the window.
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
_CONTROLS.pop(ord("\n"))
_CONTROLS.pop(ord("\t"))


def printable(text: str) -> str:
    """Without control characters but line breaks and tabs. Each character is judged alone, so any cut will do."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    return " ".join(printable(text).split())


class SafeConsole(Console):
    """rich's console, whose own styles are all that controls the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def console() -> SafeConsole:
    return SafeConsole(highlight=False)
