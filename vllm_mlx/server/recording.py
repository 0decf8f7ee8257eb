"""Reply writers that hand the whole response on when it has ended. A client that goes away leaves nothing."""

import logging
from collections.abc import Callable

from ..api.responses.encode import ResponseStream
from ..api.responses.fold import ResponseFold
from ..api.responses.replies import ResponseReply
from ..core.errors import VLLMMLXError
from ..core.events import GenerationEvent

logger = logging.getLogger(__name__)
Keep = Callable[[ResponseReply], None]


class RecordingStream:
    """`api.encoder.StreamEncoder`."""

    def __init__(self, stream: ResponseStream, keep: Keep) -> None:
        self._stream = stream
        self._keep = keep
        self.open = stream.open
        self.feed: Callable[[int, GenerationEvent], bytes] = stream.feed
        self.keep_alive = stream.keep_alive

    def fail(self, error: VLLMMLXError) -> bytes:
        wire = self._stream.fail(error)
        try:
            self._keep(self._stream.reply)
        except Exception:  # the client must read how its stream ended, whether or not that can be stored
            logger.exception("A response that failed could not be stored")
        return wire

    def close(self) -> bytes:
        self._keep(self._stream.reply)
        return self._stream.close()


class RecordingFold:
    """`api.encoder.ReplyFold`."""

    def __init__(self, fold: ResponseFold, keep: Keep) -> None:
        self._fold = fold
        self._keep = keep
        self.feed: Callable[[int, GenerationEvent], None] = fold.feed

    def finish(self) -> bytes:
        body = self._fold.finish()
        self._keep(self._fold.reply)
        return body
