"""The rules of the prefix cache, stated naively over flat tables: every held position, every end of a run. Slow.

A position is the tuple of all tokens up to it. A run ends at a stored or split position and begins after the run
before it. Nothing is indexed, nothing is remembered: each rule is a search through the tables.
"""

import copy
from dataclasses import dataclass, field

from tests.cache.fakes import WINDOW_BYTES, Ids, token_bytes
from vllm_mlx.cache.node import NODE_BYTES, ResumeRule, Space

KEY_BYTES = 8


@dataclass(eq=False)
class Run:
    """What is known of a run; its end is its place in the table."""

    number: int
    last_used: float
    state_used: float
    state_bytes: int | None = None
    hits: int = 0
    state_hits: int = 0
    forks: int = 0
    has_branched: bool = False
    pins: int = 0
    is_stored_end: bool = True


@dataclass
class Table:
    """One space."""

    rule: ResumeRule
    window_held: dict[Ids, bool] = field(default_factory=dict)  # every held position
    runs: dict[Ids, Run] = field(default_factory=dict)  # by end

    def common(self, ids: Ids) -> int:
        return next((n for n in range(len(ids), 0, -1) if ids[:n] in self.window_held), 0)

    def run_end(self, position: Ids) -> Ids:
        """The end of the run that a held position is in."""
        return min((end for end in self.runs if end[: len(position)] == position), key=len)

    def run_start(self, end: Ids) -> int:
        return max((len(other) for other in self.runs if other != end and end[: len(other)] == other), default=0)

    def window_start(self, end: Ids) -> int:
        lacking = [n for n in range(self.run_start(end) + 1, len(end) + 1) if not self.window_held[end[:n]]]
        return max(lacking, default=self.run_start(end))

    def num_children(self, end: Ids) -> int:
        return sum(len(p) == len(end) + 1 and p[: len(end)] == end for p in self.window_held)

    def ends_on(self, position: Ids) -> list[Ids]:
        """The ends of all runs on the way to a held position, from the first."""
        ends = [end for end in self.runs if position[: len(end)] == end]
        return sorted({*ends, self.run_end(position)}, key=len)

    def can_resume(self, position: Ids) -> bool:
        if not position:
            return False
        if self.rule.needs_state and (position not in self.runs or self.runs[position].state_bytes is None):
            return False
        first = 0 if self.rule.window is None else max(0, len(position) - self.rule.window)
        return self.rule.window is None or all(
            self.window_held[position[:n]] for n in range(first + 1, len(position) + 1)
        )

    def deepest(self, position: Ids) -> int:
        """The last resume point at or before a held position; 0: none."""
        return next((n for n in range(len(position), 0, -1) if self.can_resume(position[:n])), 0)

    def run_bytes(self, end: Ids) -> int:
        positions = [end[:n] for n in range(self.run_start(end) + 1, len(end) + 1)]
        return sum(token_bytes(p[-1]) + WINDOW_BYTES * self.window_held[p] for p in positions)

    def used_bytes(self) -> int:
        kv = sum(token_bytes(p[-1]) + WINDOW_BYTES * held for p, held in self.window_held.items())
        states = sum(run.state_bytes or 0 for run in self.runs.values())
        keys = sum(KEY_BYTES * len(end) for end in self.runs if not self.num_children(end))
        return kv + states + keys + NODE_BYTES * len(self.runs)

    def remove_run(self, end: Ids) -> Ids:
        """Returns the end of the run before it."""
        start = self.run_start(end)
        for n in range(start + 1, len(end) + 1):
            del self.window_held[end[:n]]
        del self.runs[end]
        return end[:start]

    def cut(self, end: Ids, keep: int) -> None:
        for n in range(keep + 1, len(end) + 1):
            del self.window_held[end[:n]]
        run = self.runs[end[:keep]] = self.runs.pop(end)
        run.state_bytes, run.is_stored_end = None, True

    def retreat(self, end: Ids, limit: int) -> None:
        """Cuts a path back to its last resume point up to `limit`, or to what others use or pin."""
        while end and not self.num_children(end) and not self.runs[end].pins:
            start = self.run_start(end)
            point = next((n for n in range(min(limit, len(end)), start, -1) if self.can_resume(end[:n])), 0)
            if point == len(end):
                return
            if point:
                self.cut(end, point)
                return
            end = self.remove_run(end)


@dataclass
class Found:
    kind: str
    length: int
    common: int
    run: Run | None


class FlatCache:
    def __init__(self, *, max_bytes: int, speeds: dict[str, float], min_cut: int, rules: dict[str, ResumeRule]):
        self.max_bytes = max_bytes
        self.tables: dict[Space, Table] = {}
        self._speeds = speeds
        self._min_cut = min_cut
        self._rules = rules
        self._num_made = 0
        self._now = 0.0

    def table(self, space: Space) -> Table:
        return self.tables.setdefault(space, Table(self._rules[space[0]]))

    @property
    def used_bytes(self) -> int:
        return sum(table.used_bytes() for table in self.tables.values())

    def match(self, space: Space, ids: Ids, now: float) -> Found:
        self._now = now
        table = self.table(space)
        common = table.common(ids)
        length = table.deepest(ids[: min(common, len(ids) - 1)])
        if not length:
            return Found("miss", 0, common, None)
        run = table.runs.get(ids[:common])
        is_end = run is not None and (run.is_stored_end or not table.num_children(ids[:common]))
        if common == len(ids):
            prompt = table.runs.get(ids[:-1])  # it is stored without its last token
            is_end = is_end or (prompt is not None and prompt.is_stored_end)
        kinds = ("exact", "supersequence") if common == len(ids) else ("prefix", "lcp")
        for end in table.ends_on(ids[:length]):
            table.runs[end].last_used = now
            table.runs[end].hits += 1
            table.runs[end].forks += common == len(ids)
        last = table.runs[table.run_end(ids[:length])]
        last.state_used, last.state_hits, last.pins = now, last.state_hits + 1, last.pins + 1
        return Found(kinds[0] if is_end else kinds[1], length, common, last)

    def insert(self, space: Space, ids: Ids, start: int, window_start: int, state: int | None, now: float) -> bool:
        self._now = now
        table = self.table(space)
        common = table.common(ids)
        if common < start:
            return False
        before = copy.deepcopy(self.tables)
        state = state if table.rule.needs_state else None
        made = self._add(table, ids, common, start, window_start, state)
        if made is None or self._fit(space, made):
            for end in table.ends_on(ids):
                table.runs[end].last_used = now
            return True
        self._restore(before)
        return False

    def _add(self, table: Table, ids: Ids, common: int, start: int, window_start: int, state: int | None) -> Ids | None:
        """Puts in what is new. Returns the end of the run that needs room."""
        changed = common < len(ids)
        if changed and common:
            self._split(table, ids[:common])
        elif not changed and ids in table.runs:
            table.runs[ids].is_stored_end = True
        if not changed and state is not None and (ids not in table.runs or table.runs[ids].state_bytes is None):
            self._split(table, ids)
            run, changed = table.runs[ids], True
            run.state_bytes, run.state_used, run.state_hits, run.is_stored_end = state, self._now, 0, True
        if table.rule.window is not None:
            changed |= self._fill_windows(table, ids[:common], start, window_start)
        if 0 < common < len(ids):
            parent = table.runs[ids[:common]]
            for end in table.ends_on(ids[:common]):
                table.runs[end].forks += parent.has_branched
            parent.has_branched = True
        for n in range(common + 1, len(ids) + 1):
            table.window_held[ids[:n]] = n > window_start
        if common < len(ids):
            table.runs[ids] = self._new_run(state)
        elif ids in table.runs:
            table.runs[ids].is_stored_end = True
        return ids if changed else None

    def _fill_windows(self, table: Table, position: Ids, start: int, window_start: int) -> bool:
        """Positions bring their window KV. A run that begins before them is split where the windows begin."""
        changed = False
        for n in range(len(position), window_start, -1):
            end = table.run_end(position[:n])
            if not table.window_held[position[:n]]:
                if end == table.run_end(position):
                    self._split(table, position)
                if table.run_start(table.run_end(position[:n])) < start:
                    self._split(table, position[:window_start])
                table.window_held[position[:n]] = changed = True
        return changed

    def _new_run(self, state: int | None = None) -> Run:
        self._num_made += 1
        return Run(self._num_made, self._now, self._now, state)

    def _split(self, table: Table, position: Ids) -> None:
        if position not in table.runs:
            lower = table.runs[table.run_end(position)]
            run = self._new_run()
            run.last_used, run.hits, run.is_stored_end = lower.last_used, lower.hits, False
            run.forks, run.has_branched = lower.forks, True
            table.runs[position] = run

    def _restore(self, tables: dict[Space, Table]) -> None:
        """Puts a copy's contents back, into the runs that pins refer to."""
        for space, table in self.tables.items():
            old = tables.get(space, Table(table.rule))
            runs = {run.number: run for run in table.runs.values()}
            for end, run in old.runs.items():
                if run.number in runs:
                    runs[run.number].__dict__.update(run.__dict__)
                    old.runs[end] = runs[run.number]
            table.window_held, table.runs = old.window_held, old.runs

    def _fit(self, space: Space, end: Ids) -> bool:
        if self.used_bytes <= self.max_bytes:
            return True
        table = self.table(space)
        kept = [end] if table.runs[end].state_bytes is not None else table.ends_on(end)
        pinned = [table.runs[other] for other in kept]
        for run in pinned:
            run.pins += 1
        fits = self._least_bytes() <= self.max_bytes
        if fits:
            self.shrink_to(self.max_bytes)
        for run in pinned:
            run.pins -= 1
        return fits

    def _least_bytes(self) -> int:
        """What is left when everything that may go has gone."""
        other = copy.deepcopy(self)
        other.shrink_to(0)
        return other.used_bytes

    def make_room(self, num_bytes: int) -> bool:
        if self.used_bytes + num_bytes > self.max_bytes:
            if self._least_bytes() + num_bytes > self.max_bytes:
                return False
            self.shrink_to(self.max_bytes - num_bytes)
        return True

    def shrink_to(self, num_bytes: int) -> None:
        while (excess := self.used_bytes - num_bytes) > 0:
            victims = [
                (self._worth(table, end, self._speeds[space[0]]), run.number, table, end)
                for space, table in self.tables.items()
                for end, run in table.runs.items()
                if not run.pins and (run.state_bytes is not None or not table.num_children(end))
            ]
            if not victims:
                return
            self._evict(*min(victims, key=lambda victim: victim[:2])[2:], excess)

    def _evict(self, table: Table, end: Ids, excess: int) -> None:
        if table.num_children(end):
            table.runs[end].state_bytes, table.runs[end].state_hits = None, 0
            return
        start = table.run_start(end)
        if table.rule.needs_state:
            table.retreat(end, start)
            return
        per_token = table.run_bytes(end) / (len(end) - start) + KEY_BYTES
        table.retreat(end, max(start, len(end) - max(self._min_cut, int(-(-excess // per_token)))))

    def _worth(self, table: Table, end: Ids, s_per_token: float) -> float:
        run, children, start = table.runs[end], table.num_children(end), table.run_start(end)
        tokens = len(end) - (start if table.rule == ResumeRule() else table.deepest(end[:start]))
        if children:
            tokens = tokens if table.can_resume(end) else 0
            size, forks, goes_on, used = run.state_bytes or 0, children - 1, 0.1, run.state_used
        else:
            tokens = tokens if table.deepest(end) > start else 0
            size = table.run_bytes(end) + (run.state_bytes or 0) + NODE_BYTES + KEY_BYTES * (len(end) - start)
            forks, goes_on, used = run.forks, 1.0, run.last_used
        age = 60.0 + max(0.0, self._now - used)
        expected = forks + 4096 / (4096 + len(end))
        return s_per_token * tokens / max(1, size) * (goes_on * 60.0 / age + 0.05 * expected) / age

    def trim(self, space: Space, ids: Ids, keep: int) -> None:
        table = self.table(space)
        stored = ids[: table.common(ids)]
        if stored in table.runs:
            table.retreat(stored, keep)

    def drop_state(self, space: Space, ids: Ids) -> None:
        table = self.table(space)
        run = table.runs.get(ids)
        if run is not None and run.state_bytes is not None and not run.pins and not run.state_hits:
            run.state_bytes, run.state_hits = None, 0
            table.retreat(ids, len(ids))

    def drop(self, space: Space, ids: Ids, start: int) -> None:
        table = self.table(space)
        if table.common(ids) <= start:
            return
        damaged = table.run_end(ids[: start + 1])
        begin = table.run_start(damaged)
        first = damaged[: begin + 1]
        for position in [p for p in table.window_held if p[: len(first)] == first]:
            del table.window_held[position]
        for end in [end for end in table.runs if end[: len(first)] == first]:
            del table.runs[end]
        table.retreat(damaged[:begin], begin)

    def clear(self, fingerprint: str | None, salts: str) -> None:
        for space, table in self.tables.items():
            if fingerprint in (None, space[0]) and space[1].startswith(salts):
                for end in sorted(table.runs, key=len, reverse=True):
                    if end in table.runs:
                        table.retreat(end, 0)
