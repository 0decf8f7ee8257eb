"""Fuzzes until the time is up, and goes on where the last run stopped. Findings are kept.

http sends requests to each route of a served checkpoint. harm sends attacks of each protocol to it, beside other
clients, which must not suffer. The other parts run the tests that draw their inputs, with more inputs.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from tests.support.drawing import LONG
from tests.support.harm.cases import Case, Drawing
from tests.support.harm.driver import Driver, Observation, ServerLost
from tests.support.harm.fields import Document
from tests.support.harm.judge import Fault, Limits, judge
from tests.support.harm.protocols import PROTOCOLS
from tests.support.harm.target import Target, target

from .routes import fuzz_server

CASES = 20  # of a round
FRESH_S = 120.0  # after so long benign requests are observed again
SMALLEST = 1 / 64  # of a case that is made smaller while it still fails
SMALL_BYTES = 2000  # such a case is not made smaller
CHEAP_S = 10.0  # nor is one that takes longer than this
CERTAIN = frozenset({"internal error", "envelope", "traceback"})  # which no busy machine causes
Totals = dict[str, float]


class Attacks:
    """Owns the server, and starts another one if it was lost or an attack has changed it."""

    def __init__(self, protocol: str, model: str) -> None:
        self._protocol, self._model = protocol, model
        self._stack = ExitStack()
        self._driver: Driver | None = None
        self._drawing: Drawing | None = None
        self._usual: dict[tuple[str, int, int], tuple[float, Observation]] = {}
        self._known: set[tuple[str, frozenset[str]]] = set()  # kinds of findings that were reported
        self._totals: Totals = {}

    def close(self) -> None:
        self._stack.close()
        self._driver = None

    def round(self, number: int, until_s: float) -> tuple[list[str], Totals]:
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
        _add(self._totals, {"findings": 1})
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
        _add(self._totals, {"repeated": 1})
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
        answers = Counter(f"answers {answer.status}" for outcome in seen.outcomes for answer in outcome.answers)
        missing = sum(outcome.missing is not None for outcome in seen.outcomes)
        kept_mb = (seen.after_bytes - seen.before_bytes) / 1e6
        worst = {"worst loop_delay_s": round(seen.loop_delay_s, 3), "worst kept_mb": round(kept_mb, 3)}
        counts = {"cases": 1, "bytes": case.attack.num_bytes, "answers missing": missing}
        _add(self._totals, {**counts, **answers, **worst})


_PROJECT = Path(__file__).resolve().parents[2]
HANGS_S = 1800  # one property
MAX_MB = 2048  # of the process, of which most is libraries
PROPERTIES = {
    "parsers": ("tests/formats/test_properties.py", "tests/formats/test_all_formats.py"),
    "decoders": ("tests/api/test_any_body.py", "tests/server/test_bodies.py"),
    "templates": ("tests/prompt/test_any_template.py", "tests/prompt/test_any_conversation.py"),
    "schemas": ("tests/guidance/test_any_schema.py",),
    "images": ("tests/media/test_anything.py",),
    "load": ("tests/engine/test_any_load.py",),
}


def run_properties(what: str, number: int, until_s: float) -> list[str]:
    """Return the tests that failed, hung, or took too much memory. A round that has begun is completed."""
    command = [sys.executable, "-m", "pytest", f"--hypothesis-profile={LONG}", f"--hypothesis-seed={number}"]
    command += [f"--timeout={HANGS_S}", *PROPERTIES[what]]
    done = subprocess.run(command, cwd=_PROJECT, capture_output=True, text=True, check=False)
    findings = [] if done.returncode == 0 else [f"{what} (round {number}): {done.stdout[-4000:]}"]
    if (peak_mb := _peak_mb()) > MAX_MB:
        findings.append(f"{what} (round {number}): {peak_mb} MB")
    return findings


def _peak_mb() -> int:
    """Return the peak memory of the largest child that has ended, in MB."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak >> (20 if sys.platform == "darwin" else 10)


STATE = Path(__file__).resolve().parents[2] / ".fuzz.json"
HTTP, HARM = "http", "harm"
Round = Callable[[int, float], tuple[list[str], Totals]]


def main() -> int:
    options = _options()
    if options.case is not None:
        return _one_case(options)
    state: dict[str, Any] = json.loads(STATE.read_text()) if STATE.exists() else {}
    for what in _parts(options):
        with _rounds_of(what, options) as fuzz:
            until_s = time.monotonic() + 60 * options.minutes
            kept = state.setdefault(what, {"rounds": 0, "minutes": 0.0, "findings": [], "totals": {}})
            for progress in _run(fuzz, kept, until_s):
                _save(what, progress)
                print(f"{what}: {progress['rounds']} rounds, {progress['minutes']:.1f} min", flush=True)
        print(f"{what}: {json.dumps(state[what].get('totals', {}))}", flush=True)
    findings = [finding for progress in state.values() for finding in progress["findings"]]
    print("\n".join([*findings, f"{len(findings)} findings"]))
    return 1 if findings else 0


def _parts(options: argparse.Namespace) -> list[str]:
    """Return the parts to run. `harm` is one part for each protocol."""
    attacked = [f"{HARM} {protocol}" for protocol in options.protocol or PROTOCOLS]
    parts = options.what or [HTTP, HARM, *PROPERTIES]
    return [part for what in parts for part in (attacked if what == HARM else [what])]


def _one_case(options: argparse.Namespace) -> int:
    """Run a finding of `harm` again."""
    if options.protocol is None or len(options.protocol) != 1:
        raise SystemExit("--case needs one --protocol.")
    with closing(Attacks(options.protocol[0], options.model)) as attacks:
        lines = attacks.try_again(options.case, options.scale)
    print("\n".join(lines))
    return 1 if len(lines) > 1 else 0


def _run(fuzz: Round, progress: dict[str, Any], until_s: float) -> Iterator[dict[str, Any]]:
    while (started_s := time.monotonic()) < until_s:
        findings, totals = fuzz(progress["rounds"], until_s)
        progress["findings"] += findings
        progress["rounds"] += 1
        progress["minutes"] += (time.monotonic() - started_s) / 60
        _add(progress["totals"], totals)
        yield progress


def _add(totals: Totals, more: Totals) -> None:
    """Add counts, and keep the largest of each figure whose name begins with `worst`."""
    for name, number in more.items():
        known = totals.get(name, 0)
        totals[name] = max(known, number) if name.startswith("worst") else known + number


@contextmanager
def _rounds_of(what: str, options: argparse.Namespace) -> Iterator[Round]:
    if what == HTTP:
        with fuzz_server(options.model, options.examples) as fuzz:
            yield lambda number, until_s: (fuzz(number, until_s), {})
    elif what.startswith(HARM):
        with closing(Attacks(what.split()[1], options.model)) as attacks:
            yield attacks.round
    else:
        yield lambda number, until_s: (run_properties(what, number, until_s), {})


def _save(what: str, progress: dict[str, Any]) -> None:
    """Save one part, and keep the parts that other processes have saved meanwhile."""
    saved = json.loads(STATE.read_text()) if STATE.exists() else {}
    STATE.write_text(json.dumps({**saved, what: progress}, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--what", action="append", choices=[HTTP, HARM, *PROPERTIES], help="one or more (default: all)")
    parser.add_argument("--protocol", action="append", choices=PROTOCOLS, help="harm: one or more (default: all)")
    parser.add_argument("--case", type=int, help="harm: run this case of one protocol again, and nothing else")
    parser.add_argument("--scale", type=float, default=1.0, help="harm: size of that case, 1 as it was drawn")
    parser.add_argument("--minutes", type=float, default=30, help="how long each is tried (default: 30)")
    parser.add_argument(
        "--examples", type=int, default=50, help="http: requests to each route in a round (default: 50)"
    )
    parser.add_argument("--model", default="demo", help="checkpoint to serve (default: demo)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
