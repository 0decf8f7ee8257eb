"""The ranks of one model as seen by this process: its connections, and the facts that all ranks share."""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from ..util.faults import RanksParted
from .channel import Message
from .figures import Link
from .shards import Shard
from .watch import Peer, Watch


class Ranks:
    """Rank 0 has a connection to each other rank, in the order of their numbers, and each of them one to rank 0."""

    group: mx.distributed.Group  # once the data channel is connected
    shard: Shard  # once the checkpoint is accepted
    link: Link  # once it is measured

    def __init__(self, watch: Watch, size: int, told: Message):
        """`told` is rank 0's message to all others."""
        self.watch, self.size, self.told = watch, size, told
        self.rank, self.peers = watch.rank, watch.peers

    def exchange(self, what: str, own: Any, timeout_s: float | None = None) -> list[Any]:
        """Return the answer of each rank, by rank. Raises RanksParted if one does not take part in time."""
        self.watch.advance()
        if self.rank:
            self.peers[0].say({what: own})
            told: list[Any] = self._hear(self.peers[0], what, timeout_s)
            return told
        told = [own, *(self._hear(peer, what, timeout_s) for peer in self.peers)]
        for peer in self.peers:
            peer.say({what: told})
        return told

    def union(self, what: str, own: Iterable[int]) -> set[int]:
        """Return the numbers that any rank says."""
        return {number for numbers in self.exchange(what, list(own)) for number in numbers}

    def _hear(self, peer: Peer, what: str, timeout_s: float | None) -> Any:
        message = peer.hear(timeout_s)
        if what not in message:
            raise RanksParted(f"{peer.name} does not do what rank {self.rank} does, which expects its {what}.")
        return message[what]
