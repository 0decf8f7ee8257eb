"""Events of one choice → blocks: reasoning, text and tool calls, one after the other. Knows no protocol."""

from dataclasses import dataclass
from typing import Literal

from ..core.events import (
    Finished,
    GenerationEvent,
    ReasoningDelta,
    SearchDone,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

Kind = Literal["text", "reasoning", "call", "search"]
ReasoningMode = Literal["separate", "inline", "hidden"]

OPEN, CLOSE = "<think>\n", "\n</think>\n\n"


class ReasoningView:
    """Rewrites the events of one choice by the client's view of the reasoning.

    `separate`: the events stay as they are; `inline`: the reasoning is text between tags; `hidden`: it is left out.
    Usage counts it in every mode.
    """

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


@dataclass(frozen=True, slots=True)
class BlockStart:
    """The start of a block: `call` of a tool call, `search` of a search's result. Blocks are numbered without gaps."""

    index: int
    kind: Kind
    call: ToolCallStart | None = None
    search: SearchDone | None = None


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """Text that is never empty; in a call, a fragment of its arguments' JSON."""

    index: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The complete block. If its call was not ended, `text` may not be JSON. `search` has the results of a search.

    `is_broken`: a call that cannot be read; it is part of a stream only, since its text follows as content.
    """

    index: int
    kind: Kind
    text: str
    call: ToolCallStart | None = None
    search: SearchDone | None = None
    is_broken: bool = False


BlockEvent = BlockStart | BlockDelta | BlockEnd


class BlockSplitter:
    """Cuts a reply into blocks that never overlap: an event of another block ends the open one, even a call.

    A reply without any content has one empty text block. `Finished` ends the last block. Text before and after
    reasoning that the client does not see separately is one block.
    """

    def __init__(self, reasoning: ReasoningMode = "separate") -> None:
        self._view = None if reasoning == "separate" else ReasoningView(reasoning)
        self._num_blocks = 0
        self._open: BlockStart | None = None
        self._texts: list[str] = []

    def feed(self, event: GenerationEvent) -> tuple[BlockEvent, ...]:
        if self._view is None:
            return self._feed(event)
        return tuple(block for seen in self._view.feed(event) for block in self._feed(seen))

    def _feed(self, event: GenerationEvent) -> tuple[BlockEvent, ...]:
        match event:
            case TextDelta():
                return self._delta("text", event.text) if event.text else ()
            case ReasoningDelta():
                return self._delta("reasoning", event.text) if event.text else ()
            case ToolCallStart():
                return self._start("call", event)
            case ToolCallDelta() if event.arguments and self._is_open("call"):
                return (self._add("call", event.arguments),)
            case ToolCallEnd() if self._is_open("call"):
                added = () if self._texts else (self._add("call", "{}"),)
                return (*added, *self.close(is_broken=event.is_broken))
            case SearchDone():
                ended = self.close()
                self._num_blocks += 1
                index = self._num_blocks - 1
                return (*ended, BlockStart(index, "search", search=event), BlockEnd(index, "search", "", search=event))
            case Finished():
                return self._finish()
            case _:
                return ()

    def close(self, *, is_broken: bool = False) -> tuple[BlockEvent, ...]:
        """End the open block, if there is one."""
        opened, self._open = self._open, None
        if opened is None:
            return ()
        text = "".join(self._texts)
        self._texts.clear()
        return (BlockEnd(opened.index, opened.kind, text, opened.call, is_broken=is_broken),)

    def _finish(self) -> tuple[BlockEvent, ...]:
        if self._num_blocks == 0:
            return (*self._start("text"), *self.close())
        return self.close()

    def _is_open(self, kind: Kind) -> bool:
        return self._open is not None and self._open.kind == kind

    def _delta(self, kind: Kind, text: str) -> tuple[BlockEvent, ...]:
        if self._is_open(kind):
            return (self._add(kind, text),)
        return (*self._start(kind), self._add(kind, text))

    def _start(self, kind: Kind, call: ToolCallStart | None = None) -> tuple[BlockEvent, ...]:
        ended = self.close()
        self._open = BlockStart(self._num_blocks, kind, call)
        self._num_blocks += 1
        return (*ended, self._open)

    def _add(self, kind: Kind, text: str) -> BlockDelta:
        assert self._open is not None, "only an open block grows"
        self._texts.append(text)
        return BlockDelta(self._open.index, kind, text)
