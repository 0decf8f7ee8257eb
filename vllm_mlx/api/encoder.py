"""What every protocol's reply writers promise the server. Knows no protocol."""

from typing import Protocol

from ..core.errors import VLLMMLXError
from ..core.events import GenerationEvent


class StreamEncoder(Protocol):
    """Events → bytes of the event stream, one writer a reply.

    `open`, then `feed` for every event except Failed, then either `close` or `fail`; `keep_alive` at any moment
    between `open` and the end. Empty bytes: nothing to send.
    """

    def open(self) -> bytes: ...

    def feed(self, index: int, event: GenerationEvent) -> bytes: ...

    def keep_alive(self) -> bytes: ...

    def fail(self, error: VLLMMLXError) -> bytes: ...

    def close(self) -> bytes: ...


class ReplyFold(Protocol):
    """The same events → the body of one reply. `feed` for every event except Failed, then `finish` once."""

    def feed(self, index: int, event: GenerationEvent) -> None: ...

    def finish(self) -> bytes: ...


class TokenNames(Protocol):
    """How single tokens are written in log-probabilities."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...
