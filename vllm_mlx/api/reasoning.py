"""What a client sees of the reasoning. Usage counts it in every mode."""

from typing import Literal

from ..core.events import Finished, GenerationEvent, ReasoningDelta, TextDelta, ToolCallStart

ReasoningMode = Literal["separate", "inline", "hidden"]

OPEN, CLOSE = "<think>\n", "\n</think>\n\n"


class ReasoningView:
    """Rewrites the events of one choice: apart as they are, as tagged text before the content, or left out."""

    def __init__(self, mode: ReasoningMode) -> None:
        self._mode = mode
        self._is_open = False

    def feed(self, event: GenerationEvent) -> tuple[GenerationEvent, ...]:
        if self._mode == "separate":
            return (event,)
        match event:
            case ReasoningDelta():
                return self._reasoning(event.text)
            case TextDelta() | ToolCallStart() | Finished() if self._is_open:
                self._is_open = False
                return (TextDelta(CLOSE), event)
            case _:
                return (event,)

    def _reasoning(self, text: str) -> tuple[GenerationEvent, ...]:
        if self._mode == "hidden":
            return ()
        tag = "" if self._is_open else OPEN
        self._is_open = True
        return (TextDelta(tag + text),)
