"""Rounds of attacks on a served checkpoint, which finds those that harm other clients. It knows no protocol."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.support.harm.cases import Case, Drawing
from tests.support.harm.driver import Driver, Observation, ServerLost
from tests.support.harm.fields import Document
from tests.support.harm.judge import Fault, Limits, judge
from tests.support.harm.target import Target, target

CASES = 20  # of a round
FRESH_S = 120.0  # after so long benign requests are observed again
SMALLEST = 1 / 64  # of a case that is made smaller while it still fails
SMALL_BYTES = 2000  # such a case is not made smaller
CHEAP_S = 10.0  # nor is one that takes longer than this
CERTAIN = frozenset({"internal error", "envelope", "traceback"})  # which no busy machine causes


@contextmanager
def harm_rounds(protocol: str, model: str) -> Iterator["Attacks"]:
    attacks = Attacks(protocol, model)
    try:
        yield attacks
    finally:
        attacks.close()


class Attacks:
    """Owns the server, and starts another one if it was lost or an attack has changed it."""

    def __init__(self, protocol: str, model: str) -> None:
        self._protocol, self._model = protocol, model
        self._stack = ExitStack()
        self._driver: Driver | None = None
        self._drawing: Drawing | None = None
        self._usual: dict[tuple[str, int, int], tuple[float, Observation]] = {}
        self._known: set[tuple[str, frozenset[str]]] = set()  # kinds of findings that were reported
        self._totals: dict[str, float] = {}

    def close(self) -> None:
        self._stack.close()
        self._driver = None

    def round(self, number: int, until_s: float) -> tuple[list[str], dict[str, float]]:
        """Return the findings, and the totals of this round."""
        self._totals = {}
        found = []
        for seed in range(number * CASES, (number + 1) * CASES):
            if time.monotonic() > until_s:
                break
            found += self.try_case(seed)
        return found, self._totals

    def try_again(self, seed: int, scale: float) -> list[str]:
        """Return the name of one case, and its faults."""
        faults = self._faults_of(seed, scale)
        return [self._case(seed, scale).attack.name, *map(str, faults)]

    def try_case(self, seed: int, scale: float = 1.0) -> list[str]:
        """Return the finding, if it is new, for the smallest case that still shows it."""
        started_s = time.monotonic()
        if not (faults := self._confirmed(seed, scale)):
            return []
        limits = {fault.limit for fault in faults}
        is_cheap = time.monotonic() - started_s < CHEAP_S
        while is_cheap and scale > SMALLEST and self._case(seed, scale).attack.num_bytes > SMALL_BYTES:
            smaller = self._faults_of(seed, scale / 2)
            if not limits & {fault.limit for fault in smaller}:
                break
            faults, scale = smaller, scale / 2
        case = self._case(seed, scale)
        self._add("findings", 1)
        lines = [f"{case.attack.name} (seed {seed})", *(f"  {fault}" for fault in faults), f"  again: {case.repeat}"]
        kind = (case.kind, frozenset(limits))
        if kind in self._known:
            return []
        self._known.add(kind)
        return ["\n".join(lines)]

    def _confirmed(self, seed: int, scale: float) -> list[Fault]:
        """Faults that come again beside fresh benign requests: a busy machine causes some that do not."""
        first = self._faults_of(seed, scale)
        limits = {fault.limit for fault in first} - CERTAIN
        if not limits:
            return first
        self._usual.clear()
        self._add("repeated", 1)
        certain = [fault for fault in first if fault.limit in CERTAIN]
        return certain + [fault for fault in self._faults_of(seed, scale) if fault.limit in limits | CERTAIN]

    def _faults_of(self, seed: int, scale: float) -> list[Fault]:
        case = self._case(seed, scale)
        driver = self._ready()
        try:
            faults, seen = judge(case.attack, case.benign, driver.observe, Limits(), self._usual_of(case))
        except ServerLost as error:
            self.close()
            return [Fault("server lost", str(error))]
        self._count(case, seen)
        if trace := driver.target.new_traceback():
            faults.append(Fault("traceback", trace))
        if any(fault.limit in ("left behind", "no answer", "other clients") for fault in faults):
            self.close()
        return faults

    def _case(self, seed: int, scale: float) -> Case:
        self._ready()
        assert self._drawing is not None
        return self._drawing.draw(seed, scale)

    def _ready(self) -> Driver:
        if self._driver is None:
            started: Target = self._stack.enter_context(target(self._model))
            self._driver = Driver(started)
            self._stack.callback(self._driver.close)
            self._drawing = Drawing(self._protocol, Document(started.get("/openapi.json").json()))
            self._usual.clear()
            self._driver.observe(self._drawing.draw(0).benign)  # the first requests of a server cost more
        return self._driver

    def _usual_of(self, case: Case) -> Observation:
        """Return the observation of benign requests of nearly this size."""
        key = (case.benign.path, case.benign.num_bytes.bit_length(), len(case.benign.shots))
        seen_s, usual = self._usual.get(key, (0.0, None))
        if usual is None or time.monotonic() - seen_s > FRESH_S:
            usual = self._ready().observe(case.benign)
            self._usual[key] = time.monotonic(), usual
        return usual

    def _count(self, case: Case, seen: Observation) -> None:
        self._add("cases", 1)
        self._add("bytes", case.attack.num_bytes)
        for answer in (answer for outcome in seen.outcomes for answer in outcome.answers):
            self._add(f"answers {answer.status}", 1)
        self._add("answers missing", sum(outcome.missing is not None for outcome in seen.outcomes))
        worst = {"loop_delay_s": seen.loop_delay_s, "kept_mb": (seen.after_bytes - seen.before_bytes) / 1e6}
        for name, value in worst.items():
            self._totals[f"worst {name}"] = max(self._totals.get(f"worst {name}", 0.0), round(value, 3))

    def _add(self, name: str, number: float) -> None:
        self._totals[name] = self._totals.get(name, 0) + number
