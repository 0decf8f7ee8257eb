"""Watches the ranks of a model from threads of its own, since a thread that waits for a collective may never return.

A rank is lost when its connection ends, when it says nothing, or when it makes no progress. It knows no plan.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

from ..core.errors import ConfigError
from .channel import Channel, Lost, Message
from .figures import RankRow
from .lockstep import STOP, Progress

logger = logging.getLogger(__name__)
BEAT_S = 0.5  # between two heartbeats
SILENCE_S = 3.0  # without any message, after which a rank counts as lost
LOADING_SILENCE_S = 9.0  # the same while a rank loads, when its interpreter may be busy for long
STEP_S = 60.0  # after which a step counts as hung, unless it was reckoned to take long
STEP_RATIO = 10  # times the reckoned time of a step
_LOOK_S = 0.25
_MOMENT_S = 1.0  # the most that a look counts, however long this process did not run
_LEAVE_S = 1.0  # for the last message
Ended = Callable[[Exception | None], None]  # it gets ConfigError if a new start would fail, too
Plans = tuple[int, int]  # the last plan that was begun, and the last that was done


class Peer:
    """Another rank. Its messages are read at once, whatever this process computes; heartbeats go to the watch."""

    def __init__(self, rank: int, channel: Channel):
        self.rank = rank
        self.host, self.own_host = channel.peer, channel.host
        self.name = channel.name = f"Rank {rank} ({self.host})"
        self.beat: Message = {}  # the last heartbeat
        self.plans: Plans = (0, 0)
        self.silent_s = 0.0  # since its last message
        self._channel = channel
        self._inbox: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()

    @property
    def num_waiting(self) -> int:
        """Messages that have arrived and that no thread has read."""
        return self._inbox.qsize()

    def say(self, message: Message) -> int:
        """Send a message, from any thread. Returns its number of bytes. Raises Lost."""
        return self._channel.say(message)

    def hear(self, timeout_s: float | None = None) -> Message:
        """Wait for the next message but heartbeats. Raises why the peer has ended, and Lost after `timeout_s`."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise Lost(f"{self.name} has not answered for {timeout_s:g} s.") from None
        if isinstance(message, Exception):
            self._inbox.put(message)
            raise message
        return message

    def listen(self) -> Exception | None:
        """Read until the peer's last message. Returns why the peer has ended; None if it did so in good order."""
        end: Exception | None
        while True:
            try:
                message = self._channel.hear()
            except Lost as error:
                message, end = {}, error
            else:
                self.silent_s = 0.0
                if "beat" in message:
                    self.beat, self.plans = message, tuple(message["beat"])
                    continue
                end = self._end(message)
            self._inbox.put(message if end is None else end)
            if end is not None or STOP in message:
                return end

    def _end(self, message: Message) -> Exception | None:
        reason = message.get(STOP, True)
        kind = ConfigError if message.get("refuses") else Lost
        return None if reason is True else kind(f"{self.name} has ended: {reason}")


class Watch(Progress):
    """Says this rank's heartbeats and watches those of its peers: a worker watches rank 0, and rank 0 all workers."""

    def __init__(self, rank: int, channels: Mapping[int, Channel], ended: Ended):
        """`rank` is this process's. `ended` is called once, on any thread, with the reason why the ranks cannot go on;
        None if rank 0 has stopped in good order.
        """
        self._rank = rank
        self.peers = tuple(Peer(rank, channel) for rank, channel in channels.items())
        self._ended = ended
        self._is_loading = True
        self._plans: Plans = (0, 0)
        self._limit_s = STEP_S
        self._num_tokens, self._begun_s = 0, 0.0  # of the last plan that was begun
        self._token_s = 0.0  # the longest time that a token of a chunk took
        self._has_ended = threading.Lock()
        for peer in self.peers:
            threading.Thread(target=self._listen, args=(peer,), name=peer.name, daemon=True).start()
        for target in (self._beat, self._look):
            threading.Thread(target=target, name="watch of ranks", daemon=True).start()

    def ready(self) -> None:
        """From now on, this rank is always able to say something."""
        self._is_loading = False
        if self._rank:
            logger.info("Rank %d is ready", self._rank)

    def begin(self, number: int, num_tokens: int) -> None:
        self._num_tokens, self._begun_s = num_tokens, time.monotonic()
        self._limit_s = max(STEP_S, STEP_RATIO * num_tokens * self._token_s)
        self._plans = (number, self._plans[1])

    def done(self) -> None:
        if self._num_tokens:
            self._token_s = max(self._token_s, (time.monotonic() - self._begun_s) / self._num_tokens)
        self._plans = (self._plans[0], self._plans[0])

    def leave(self, error: Exception | None = None) -> None:
        """Tell the peers that this rank ends, and why; without an error, that it ends in good order."""
        self._has_ended.acquire(blocking=False)
        self._tell(error).join(_LEAVE_S)

    def end(self, error: Exception | None) -> None:
        """Report the end of the ranks, here and to the peers, unless that was done before."""
        if self._has_ended.acquire(blocking=False):
            self._tell(error)
            self._ended(error)

    def _tell(self, error: Exception | None) -> threading.Thread:
        """Say the last message on a thread of its own, which a frozen peer may block."""
        message = {STOP: True if error is None else str(error), "refuses": isinstance(error, ConfigError)}
        thread = threading.Thread(target=self._say, args=(message,), daemon=True)
        thread.start()
        return thread

    def _say(self, message: Message) -> None:
        for peer in self.peers:
            with suppress(Lost):  # the thread that listens reports it
                peer.say(message)

    def _listen(self, peer: Peer) -> None:
        self.end(peer.listen())

    def _beat(self) -> None:
        while True:
            self._say(self._message(self.report()))
            time.sleep(BEAT_S)

    def _message(self, figures: Message) -> Message:
        begun, done = self._plans
        waiting = sum(peer.num_waiting for peer in self.peers) if self._rank else 0
        lag_s = time.monotonic() - self._begun_s if begun > done else 0.0
        lag = [begun - done + waiting, round(lag_s, 4)]
        return {"beat": [begun, done], "is_loading": self._is_loading, "lag": lag, **figures}

    def reports(self, own: Message) -> tuple[RankRow, ...]:
        beats = {(self._rank, self.peers[0].own_host): self._message(own)}
        beats |= {(peer.rank, peer.host): peer.beat for peer in self.peers if "sum_s" in peer.beat}
        return tuple(_row(*place, **beat) for place, beat in beats.items())

    def _look(self) -> None:
        """Add up times in short pieces, so that a sleep of the whole machine counts as a moment."""
        looked_s = time.monotonic()
        seen: dict[int, Plans] = {}
        stuck_s: dict[int, float] = {}
        while True:
            time.sleep(_LOOK_S)
            passed_s, looked_s = min(time.monotonic() - looked_s, _MOMENT_S), time.monotonic()
            for peer in self.peers:
                peer.silent_s += passed_s
                is_loading = self._is_loading or peer.beat.get("is_loading", True)
                if peer.silent_s > (LOADING_SILENCE_S if is_loading else SILENCE_S):
                    self.end(Lost(f"{peer.name} is lost: it has said nothing for {peer.silent_s:.1f} s."))
            if self._rank:
                continue  # only rank 0 knows how long a step may take
            plans = {0: self._plans} | {peer.rank: peer.plans for peer in self.peers}
            for rank, (begun, done) in plans.items():
                is_stuck = done < self._plans[0] and (begun, done) == seen.get(rank)
                stuck_s[rank] = stuck_s.get(rank, 0.0) + passed_s if is_stuck else 0.0
                if stuck_s[rank] > self._limit_s:
                    self.end(Lost(f"Rank {rank} has hung for {stuck_s[rank]:.0f} s after plan {done}."))
            seen = plans


def _row(rank: int, host: str, *, beat: Plans, lag: tuple[int, float], is_loading: bool, **figures: Any) -> RankRow:
    """What a heartbeat says of its rank."""
    row = {"rank": rank, "host": host, "plan": beat[1], "lag_plans": lag[0], "lag_s": lag[1], **figures}
    return cast(RankRow, row)
