"""Events of one reply → blocks: reasoning, text and tool calls, one after the other. Knows no protocol.

What is streamed and what is folded are both made from these, so both say the same.
"""

from dataclasses import dataclass
from typing import Literal

from ..core.events import (
    Finished,
    GenerationEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

Kind = Literal["text", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class BlockStart:
    """`call` is set for a tool call. Indices count from 0 without gaps."""

    index: int
    kind: Kind
    call: ToolCallStart | None = None


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """Never empty. Of a call: a fragment of its arguments' JSON."""

    index: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The whole block. Of a call that was not ended, `text` may be no JSON."""

    index: int
    kind: Kind
    text: str
    call: ToolCallStart | None = None


BlockEvent = BlockStart | BlockDelta | BlockEnd


class BlockSplitter:
    """Blocks never overlap: what belongs to another block ends the open one, a call without its end too.

    A reply that said nothing has one empty text block. `Finished` ends the last block. With `hides_reasoning` there
    are no reasoning blocks, and the text around reasoning is one block.
    """

    def __init__(self, *, hides_reasoning: bool = False) -> None:
        self._hides_reasoning = hides_reasoning
        self._num_blocks = 0
        self._open: BlockStart | None = None
        self._texts: list[str] = []

    def feed(self, event: GenerationEvent) -> tuple[BlockEvent, ...]:
        match event:
            case TextDelta(text):
                return self._delta("text", text) if text else ()
            case ReasoningDelta(text):
                return self._delta("reasoning", text) if text and not self._hides_reasoning else ()
            case ToolCallStart():
                return self._start("call", event)
            case ToolCallDelta(arguments=text) if text and self._is_open("call"):
                return (self._add("call", text),)
            case ToolCallEnd() if self._is_open("call"):
                if self._texts:
                    return self.close()
                return (self._add("call", "{}"), *self.close())
            case Finished():
                return self._finish()
            case _:
                return ()

    def close(self) -> tuple[BlockEvent, ...]:
        """Ends the open block, if there is one."""
        opened, self._open = self._open, None
        if opened is None:
            return ()
        text = "".join(self._texts)
        self._texts.clear()
        return (BlockEnd(opened.index, opened.kind, text, opened.call),)

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
