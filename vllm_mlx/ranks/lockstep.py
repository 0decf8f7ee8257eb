"""This process among the ranks of one model: its connections, and what all ranks must know alike while they load.

Loading is collective, so an error that one rank alone meets is told to the others: they would wait for it for ever.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import mlx.core as mx

from ..core.errors import ModelLoadError, first_line
from .channel import Lost

Message = dict[str, Any]
_FAILED = "failed"  # the key of a message that ends the others' load, too


class Peer(Protocol):
    """A connection to another rank. Both raise an error if the other rank is lost."""

    def say(self, message: Message) -> int:
        """Send a message. Returns its number of bytes."""
        ...

    def hear(self, timeout_s: float | None = None) -> Message: ...


class Progress:
    """Is told what this rank does. This one tells nobody."""

    def ready(self) -> None:
        """The model is loaded."""

    def begin(self, number: int, num_tokens: int) -> None:
        """Plan `number` begins, which is more than the last one's; its chunks compute so many tokens."""

    def done(self) -> None:
        """The last plan that began is done."""


class Ranks:
    """Rank 0 has a connection to each other rank, in the order of their numbers, and each of them one to rank 0."""

    def __init__(self, group: mx.distributed.Group, peers: Rows[Peer], progress: Progress | None = None):
        self.group, self.peers = group, tuple(peers)
        self.rank, self.size = group.rank(), group.size()
        self.progress = progress or Progress()

    def exchange(self, what: str, own: Any, timeout_s: float | None = None) -> list[Any]:
        """Return what each rank says, by rank. Raises ModelLoadError if one has failed or says nothing in time."""
        if self.rank:
            self.peers[0].say({what: own})
            told: list[Any] = self._hear(self.peers[0], what, 0, timeout_s)
            return told
        told = [own, *(self._hear(peer, what, rank, timeout_s) for rank, peer in enumerate(self.peers, 1))]
        for peer in self.peers:
            peer.say({what: told})
        return told

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks the error that ends the block."""
        try:
            yield
        except Exception as error:
            with suppress(Lost):
                for peer in self.peers:
                    peer.say({_FAILED: first_line(error)})
            raise

    def _hear(self, peer: Peer, what: str, rank: int, timeout_s: float | None) -> Any:
        try:
            message = peer.hear(timeout_s)
        except Lost as error:
            raise ModelLoadError(f"Rank {rank} is lost: {error}") from error
        if _FAILED in message:
            raise ModelLoadError(f"Rank {rank} has failed: {message[_FAILED]}")
        if what not in message:
            raise ModelLoadError(f"Rank {rank} does not do what rank {self.rank} does: {what} was expected.")
        return message[what]
