"""Events → one whole response. Reads the blocks that `encode` streams, so both replies say the same."""

from ...core.events import Finished, GenerationEvent
from ..blocks import BlockEnd, BlockSplitter
from .decode import ResponseSpec
from .replies import ItemStatus, OutputItem, ResponseReply, final_status, item, response


class ResponseFold:
    """`api.encoder.ReplyFold` of Responses. `reply` is the response as it stands after the last event."""

    def __init__(self, spec: ResponseSpec) -> None:
        self._spec = spec
        self._blocks = BlockSplitter()
        self._items: list[OutputItem] = []
        self.reply: ResponseReply = response(spec, "in_progress")

    def feed(self, index: int, event: GenerationEvent) -> None:
        status: ItemStatus = final_status(event) if isinstance(event, Finished) else "completed"
        for each in self._blocks.feed(event):
            if isinstance(each, BlockEnd):
                self._items.append(item(self._spec, each, status))
        if isinstance(event, Finished):
            self.reply = response(self._spec, final_status(event), self._items, usage=event.usage)

    def finish(self) -> bytes:
        assert self.reply.status != "in_progress", "a reply is folded after it has finished"
        return self.reply.to_json().encode()
