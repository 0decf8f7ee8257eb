"""Watches the ranks of a model from threads of its own, since a thread that waits for a collective may never return.

A rank is lost when its connection ends, when it says nothing, or when it makes no progress. It knows no plan.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast

from ..core.errors import ConfigError
from .channel import Channel, Lost, Message
from .figures import RankRow

logger = logging.getLogger(__name__)
STOP = "stop"  # the key of a rank's last message: the reason, or True in good order
BEAT_S = 0.5  # between two heartbeats
SILENCE_S = 3.0  # without any message, after which a rank counts as lost
LOADING_SILENCE_S = 9.0  # the same while a rank loads, when its interpreter may be busy for long
LOAD_S = 120.0  # after which a part of a load counts as hung: a slice of the weights, or a proof
STEP_S = 60.0  # after which a step counts as hung
STEP_TOKEN_S = 0.1  # longer for each token of its chunks: ten times what a slow machine takes
_LOOK_S = 0.25
_MOMENT_S = 1.0  # the most that a look counts, however long this process did not run
LEAVE_S = 1.0  # for the last message
Ended = Callable[[Exception | None], None]  # it gets ConfigError if a new start would fail, too
Plans = tuple[int, int]  # the last plan that was begun, and the last that was done


class Peer:
    """Another rank. Its messages are read at once, whatever this process computes; heartbeats go to the watch."""

    def __init__(self, rank: int, channel: Channel):
        self.own_host = channel.host
        self.name = channel.name = f"Rank {rank} ({channel.peer})"
        self.beat: Message = {}  # the last heartbeat
        self.plans: Plans = (0, 0)
        self.silent_s = 0.0  # since its last message
        self.inbox: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        self.say, self._hear = channel.say, channel.hear

    def hear(self, timeout_s: float | None = None) -> Message:
        """Wait for the next message but heartbeats. Raises why the peer has ended, and Lost after `timeout_s`."""
        try:
            message = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise Lost(f"{self.name} has not answered for {timeout_s:g} s.") from None
        if isinstance(message, Exception):
            self.inbox.put(message)
            raise message
        return message

    def listen(self) -> Exception | None:
        """Read until the peer's last message. Returns why the peer has ended; None if it did so in good order."""
        try:
            while STOP not in (message := self._hear()):
                self.silent_s = 0.0
                if "beat" in message:
                    self.beat, self.plans = message, tuple(message["beat"])
                else:
                    self.inbox.put(message)
            end = self._end(message)
        except Lost as error:
            end = error
        self.inbox.put(end or message)
        return end

    def _end(self, message: Message) -> Exception | None:
        if (reason := message[STOP]) is True:
            return None
        kind, has_ended = (ConfigError, "refuses to start") if message["refuses"] else (Lost, "has ended")
        return kind(reason if reason.startswith("Rank ") else f"{self.name} {has_ended}: {reason}")


class Watch:
    """Says this rank's heartbeats and watches those of its peers: a worker watches rank 0, and rank 0 all workers."""

    report: Callable[[], Message] = dict  # this rank's figures

    def __init__(self, rank: int, channels: Mapping[int, Channel], ended: Ended):
        """`rank` is this process's. `ended` is called once, on any thread, with the reason why the ranks cannot go on;
        None if rank 0 has stopped in good order.
        """
        self.rank = rank
        self.peers = tuple(Peer(rank, channel) for rank, channel in channels.items())
        self._ended = ended
        self._is_loading = True
        self._plans: Plans = (1, 0)  # parts of the load, until all have loaded
        self._limit_s = STEP_S
        self._begun_s = 0.0  # when the last plan was begun
        self._has_ended = threading.Lock()
        for peer in self.peers:
            threading.Thread(target=self._listen, args=(peer,), name=peer.name, daemon=True).start()
        for target in (self._beat, self._look):
            threading.Thread(target=target, name="watch of ranks", daemon=True).start()

    def advance(self) -> None:
        """Note that a part of the load is done, if the ranks still load."""
        if self._is_loading:
            self._plans = (self._plans[0] + 1, self._plans[0])

    def ready(self) -> None:
        """Note that all ranks have loaded: from now on, each can always say something."""
        self._is_loading, self._plans = False, (0, 0)
        if self.rank:
            logger.info("Rank %d is ready", self.rank)

    def begin(self, number: int, num_tokens: int) -> None:
        """Note that plan `number` begins, after the last one; its chunks compute so many tokens."""
        self._begun_s, self._limit_s = time.monotonic(), STEP_S + STEP_TOKEN_S * num_tokens
        self._plans = (number, self._plans[1])

    def done(self) -> None:
        """Note that the last plan that began is done."""
        self._plans = (self._plans[0], self._plans[0])

    @property
    def is_working(self) -> bool:
        """Return whether a plan has begun that is not done."""
        return self._plans[0] > self._plans[1]

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the peers that this rank ends, and why. Without an error, or with an exit, it ends in good order."""
        self._has_ended.acquire(blocking=False)
        self._tell(error)

    def end(self, error: Exception | None) -> None:
        """Report the end of the ranks, to the peers and then here, unless that was done before."""
        if self._has_ended.acquire(blocking=False):
            self._tell(error)
            self._ended(error)

    def _tell(self, error: BaseException | None) -> None:
        """Say the last message on a thread of its own, which a frozen peer may block."""
        message = {
            STOP: str(error) if isinstance(error, Exception) else True,
            "refuses": isinstance(error, ConfigError),
        }
        thread = threading.Thread(target=self._say, args=(message,), daemon=True)
        thread.start()
        thread.join(LEAVE_S)

    def _say(self, message: Message) -> None:
        for peer in self.peers:
            with suppress(Lost):  # the thread that listens reports it
                peer.say(message)

    def _listen(self, peer: Peer) -> None:
        self.end(peer.listen())

    def _beat(self) -> None:
        while True:
            self._say({"beat": self._plans, "row": self._row()})
            time.sleep(BEAT_S)

    def _row(self) -> RankRow:
        begun, done = self._plans
        row = {
            "rank": self.rank,
            "host": self.peers[0].own_host,
            "plan": done,
            "lag_plans": begun - done + sum(peer.inbox.qsize() for peer in self.peers),
            "lag_s": round(time.monotonic() - self._begun_s, 4) if self.is_working else 0.0,
        }
        return cast(RankRow, row | self.report())

    def rows(self) -> tuple[RankRow, ...]:
        """Describe all ranks that have loaded, on rank 0."""
        rows = (self._row(), *(peer.beat.get("row", {}) for peer in self.peers))
        return tuple(row for row in rows if "sum_s" in row)

    def _look(self) -> None:
        """Add up times in short pieces, so that a sleep of the whole machine counts as a moment."""
        looked_s = time.monotonic()
        seen: tuple[Plans, ...] = ()
        stuck_s = 0.0
        while True:
            time.sleep(_LOOK_S)
            passed_s, looked_s = min(time.monotonic() - looked_s, _MOMENT_S), time.monotonic()
            for peer in self.peers:
                peer.silent_s += passed_s
                if peer.silent_s > (LOADING_SILENCE_S if self._is_loading else SILENCE_S):
                    self.end(Lost(f"{peer.name} is lost: it has said nothing for {peer.silent_s:.1f} s."))
            if self.rank:
                continue  # only rank 0 knows how long a step may take
            plans = (self._plans, *(peer.plans for peer in self.peers))
            done = min(done for _, done in plans)
            is_stuck = plans == seen and done < self._plans[0]
            seen, stuck_s = plans, stuck_s + passed_s if is_stuck else 0.0
            if stuck_s > (LOAD_S if self._is_loading else self._limit_s):
                ranks = " or ".join(str(rank) for rank, plan in enumerate(plans) if plan[1] == done)
                last = f"part {done} of its load" if self._is_loading else f"plan {done}"
                self.end(Lost(f"Rank {ranks} has hung for {stuck_s:.0f} s after {last}."))
