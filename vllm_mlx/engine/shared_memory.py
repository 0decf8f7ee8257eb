"""How the lanes share one memory: what each may take, whose weights come next, and whose leave for them."""

import math
import time
from collections.abc import Sequence as Items

from .lane import Lane


class SharedMemory:
    """Owns the order in which models get room. Belongs to the engine thread."""

    def __init__(self, lanes: Items[Lane]):
        self._lanes = lanes
        self._short_since_s: dict[int, float] = {}  # since when sequences that waited longest have had no room
        self.measure()

    def settle(self) -> None:
        """Find out what the lanes take, and let those leave whose memory another one waits for."""
        if len(self._lanes) == 1:
            return
        self.measure()
        while (leaving := self._lane_to_leave()) is not None:
            leaving.leave()
            self.measure()

    def measure(self) -> None:
        """Find out what the lanes leave of the memory for each other, and who has to wait for it.

        One model loads at a time. The next one is that of the sequence that has waited longest, also if a smaller model
        had room before: so no model is overtaken again and again. A model that waits for what runs delays no other.
        """
        held = [lane.held_bytes for lane in self._lanes]
        growing = [lane.scheduler.room.growth_bytes for lane in self._lanes]
        step_bytes = max(lane.facts.memory.transient_bytes for lane in self._lanes)
        for lane, own, growth in zip(self._lanes, held, growing, strict=True):
            beside_bytes = sum(held) - own + step_bytes - lane.facts.memory.transient_bytes
            lane.share(beside_bytes, sum(growing) - growth)
            others, room = self.others(lane), lane.scheduler.room
            room.is_shared = any(other.may_leave or other.is_busy for other in others)
            room.first_beside = min((other.scheduler.room.first_id for other in others), default=math.inf)
            lane.residence.is_short = room.is_shared and lane.lacking_bytes > 0
        wanting = [
            lane
            for lane in self._lanes
            if (lane.residence.is_short and not lane.scheduler.num_running) or lane.wants_weights
        ]
        able = [lane for lane in wanting if self._can_have_room(lane)]
        first = min(able, key=lambda lane: lane.first.seq_id, default=None)
        is_loading = any(lane.residence.state == "loading" for lane in self._lanes)
        for lane in wanting:
            lane.residence.is_short |= lane.runner is None and (is_loading or lane is not first)

    def _can_have_room(self, lane: Lane) -> bool:
        """Return whether all that may leave would make room for a lane's first sequence, or no other lane runs then."""
        others = self.others(lane)
        if not any(other.is_pinned and other.is_busy for other in others):
            return True
        leaving = [other for other in others if not other.is_pinned]
        growth_bytes = sum(other.scheduler.room.growth_bytes for other in leaving) if lane.runner is None else 0
        return lane.lacking_bytes <= growth_bytes + sum(other.freed_bytes for other in leaving)

    def _lane_to_leave(self) -> Lane | None:
        """Return the lane whose weights leave now for the one whose first sequence has waited longest and has no room.

        Models without work leave at once if that is enough, if nothing that runs can give memory back, or if what runs
        needs more. Once the sequence has waited for some loads, they leave in any case, and then one that is busy: it
        serves what has come until then, and nothing that comes later.
        """
        waiting = [lane for lane in self._lanes if lane.residence.is_short]
        short = [lane for lane in waiting if self._can_have_room(lane)]
        since_s, waiting_ids = self._short_since_s, {lane.first.seq_id for lane in waiting}
        self._short_since_s = {seq_id: since_s[seq_id] for seq_id in waiting_ids & since_s.keys()}
        idle = [lane for lane in self._lanes if lane.may_leave and not lane.is_busy]
        is_outgrown = any(lane.is_outgrown for lane in self._lanes)
        if not short:
            for lane in self._lanes:
                lane.stay()
            return min(idle, key=lambda lane: lane.residence.used_s) if idle and is_outgrown else None
        if any(lane.is_moving for lane in self._lanes):
            return None
        first = min(short, key=lambda lane: (lane.scheduler.num_running > 0, lane.first.seq_id))
        leaving = [lane for lane in self.others(first) if lane.may_leave]
        waits_long = self._waits_long(first)
        are_running = any(lane.scheduler.num_running for lane in self.others(first))
        is_worth_it = waits_long or is_outgrown or not are_running
        for free in (idle, [lane for lane in leaving if lane in idle or lane.is_stuck]):
            if free and (is_worth_it or sum(lane.leaving_bytes for lane in free) >= first.lacking_bytes):
                enough = [lane for lane in free if lane.reload.weights_bytes >= first.lacking_bytes]
                smallest = min(enough, key=lambda lane: lane.reload.weights_bytes, default=None)
                return smallest or min(free, key=lambda lane: lane.residence.used_s)
        are_yielding = any(lane.residence.is_yielding for lane in self._lanes)
        if leaving and not first.scheduler.num_running and waits_long and not are_yielding:
            min(leaving, key=lambda lane: lane.residence.begun_s).residence.is_yielding = True
        return None

    def _waits_long(self, lane: Lane) -> bool:
        """Return whether the first sequence of a lane has had no room for longer than it should wait."""
        since_s = self._short_since_s.setdefault(lane.first.seq_id, time.monotonic())
        return time.monotonic() - since_s > lane.patience_s

    def others(self, lane: Lane) -> list[Lane]:
        return [other for other in self._lanes if other is not lane]
