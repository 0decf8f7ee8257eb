"""Events of a reply → bytes: the interface of stream encoders, and the fold that makes every complete reply."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..core.errors import VLLMMLXError
from ..core.events import Finished, GenerationEvent, TextDelta, TokenLogprob, ToolCallStart
from .blocks import BlockEnd, BlockSplitter, Kind, ReasoningMode
from .reply import Reply


class StreamEncoder(Protocol):
    """Writes the event stream of one reply.

    `open`, then `feed` for every event except Failed, then either `close` or `fail`; `keep_alive` at any moment
    between `open` and the end. Empty bytes mean that there is nothing to send.
    """

    def open(self) -> bytes: ...

    def feed(self, index: int, event: GenerationEvent) -> bytes: ...

    def keep_alive(self) -> bytes: ...

    def fail(self, error: VLLMMLXError) -> bytes: ...

    def close(self) -> bytes: ...


class TokenNames(Protocol):
    """How single tokens are written in log-probabilities."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class FoldedChoice:
    """What one choice of a reply has said so far. `logprobs` are those of its text."""

    def __init__(self, reasoning: ReasoningMode = "separate") -> None:
        self._splitter = BlockSplitter(reasoning)
        self._end: Finished | None = None
        self.blocks: list[BlockEnd] = []
        self.logprobs: list[TokenLogprob] = []
        self.ended_in_block = False  # whether the last block was still open when the choice finished

    def feed(self, event: GenerationEvent) -> None:
        ended = [block for block in self._splitter.feed(event) if isinstance(block, BlockEnd)]
        self.blocks += ended
        match event:
            case TextDelta(logprobs=logprobs):
                self.logprobs += logprobs
            case Finished():
                self._end = event
                self.ended_in_block = bool(ended)

    @property
    def finished(self) -> Finished:
        assert self._end is not None, "a reply is folded after every choice has finished"
        return self._end

    def text(self, *kinds: Kind) -> str:
        """The text of all blocks of these kinds."""
        return "".join(block.text for block in self.blocks if block.kind in kinds)

    @property
    def calls(self) -> list[tuple[ToolCallStart, str]]:
        """Each call and its arguments, which are JSON unless the reply ended inside them."""
        return [(block.call, block.text or "{}") for block in self.blocks if block.call is not None]


class ReplyFold:
    """Folds the same events into one reply: `feed` for every event except Failed, then `finish` once.

    `write` makes the reply from its choices, in their order.
    """

    def __init__(
        self,
        write: Callable[[Sequence[FoldedChoice]], Reply],
        *,
        num_choices: int = 1,
        reasoning: ReasoningMode = "separate",
    ) -> None:
        self._write = write
        self._choices = [FoldedChoice(reasoning) for _ in range(num_choices)]

    def feed(self, index: int, event: GenerationEvent) -> None:
        self._choices[index].feed(event)

    def finish(self) -> bytes:
        return self._write(self._choices).to_json().encode()
