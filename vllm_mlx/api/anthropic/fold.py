"""Events → one whole message. Reads the blocks that `encode` streams, so both replies say the same."""

from ...core.events import Finished, GenerationEvent
from ..arguments import decode_arguments
from ..blocks import BlockEnd, BlockSplitter
from .content import encode_call_id
from .decode import MessageSpec
from .encode import signature
from .replies import MessageReply, TextReply, ThinkingReply, ToolUseReply, UsageReply, stop_of


class MessageFold:
    """`api.encoder.ReplyFold` of Messages, for one choice."""

    def __init__(self, spec: MessageSpec) -> None:
        self._spec = spec
        self._blocks = BlockSplitter(hides_reasoning=spec.thinking == "hidden")
        self._content: list[TextReply | ThinkingReply | ToolUseReply] = []
        self._end: Finished | None = None

    def feed(self, index: int, event: GenerationEvent) -> None:
        for each in self._blocks.feed(event):
            if isinstance(each, BlockEnd):
                self._content.append(self._block(each))
        if isinstance(event, Finished):
            self._end = event

    def finish(self) -> bytes:
        assert self._end is not None, "a reply is folded after it has finished"
        reason, sequence = stop_of(self._end)
        message = MessageReply(
            id=self._spec.reply_id,
            model=self._spec.model,
            content=self._content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=UsageReply.of(self._end.usage),
        )
        return message.to_json().encode()

    def _block(self, block: BlockEnd) -> TextReply | ThinkingReply | ToolUseReply:
        if block.call is not None:
            call_id = encode_call_id(block.call.call_id)
            return ToolUseReply(id=call_id, name=block.call.name, input=decode_arguments(block.text))
        if block.kind == "reasoning":
            shown = "" if self._spec.thinking == "sealed" else block.text
            return ThinkingReply(thinking=shown, signature=signature(self._spec, block.text))
        return TextReply(text=block.text)
