"""This process among the ranks of one model: its connections, and what all ranks must know alike while they load."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import mlx.core as mx

from ..core.faults import Fault, RanksParted, device_fault
from .channel import Message
from .figures import Link, RankRow

STOP = "stop"  # the key of a rank's last message: the reason, or True in good order
_VERDICT_S = 5.0  # until it is known which rank has ended, and why


class Peer(Protocol):
    """A connection to another rank. Both raise RanksParted if the other rank is lost."""

    def say(self, message: Message) -> int:
        """Send a message. Returns its number of bytes."""
        ...

    def hear(self, timeout_s: float | None = None) -> Message:
        """Wait for the next message. Raises ConfigError if that rank has ended because a new start would fail, too."""
        ...


class Progress:
    """Receives what this rank does. This base class passes nothing on to other ranks."""

    report: Callable[[], Message] = dict  # what heartbeats say besides

    def ready(self) -> None:
        """The model is loaded."""

    def begin(self, number: int, num_tokens: int) -> None:
        """Plan `number` begins, which is more than the last one's; its chunks compute so many tokens."""

    def done(self) -> None:
        """The last plan that began is done."""

    def reports(self, own: Message) -> tuple[RankRow, ...]:
        """Describe all ranks on rank 0, whose figures are its own."""
        return ()


class Ranks:
    """Rank 0 has a connection to each other rank, in the order of their numbers, and each of them one to rank 0."""

    def __init__(self, group: mx.distributed.Group, peers: Rows[Peer], progress: Progress | None = None):
        self.group, self.peers = group, tuple(peers)
        self.rank, self.size = group.rank(), group.size()
        self.progress = progress or Progress()
        self.link: Link | None = None  # once it is measured

    def exchange(self, what: str, own: Any, timeout_s: float | None = None) -> list[Any]:
        """Return what each rank says, by rank. Raises RanksParted if one does not take part in time."""
        if self.rank:
            self.peers[0].say({what: own})
            told: list[Any] = self._hear(self.peers[0], what, 0, timeout_s)
            return told
        told = [own, *(self._hear(peer, what, rank, timeout_s) for rank, peer in enumerate(self.peers, 1))]
        for peer in self.peers:
            peer.say({what: told})
        return told

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Raise why another rank has ended, in place of what this rank meets because of it."""
        try:
            yield
        except RuntimeError as error:
            if device_fault(error) is Fault.PARTED:
                for peer in self.peers:
                    with suppress(RanksParted):
                        while True:
                            peer.hear(_VERDICT_S)
            raise

    def _hear(self, peer: Peer, what: str, rank: int, timeout_s: float | None) -> Any:
        message = peer.hear(timeout_s)
        if what not in message:
            raise RanksParted(f"Rank {rank} does not do what rank {self.rank} does, which expects its {what}.")
        return message[what]
