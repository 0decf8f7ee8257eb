"""Fuzzes until the time is up, and goes on where the last run stopped. Findings are kept.

http sends requests to each route of a served checkpoint. harm sends attacks of each protocol to it, beside other
clients, which must not suffer. The other parts run the tests that draw their inputs, with more inputs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.harm.protocols import PROTOCOLS

from .harm import harm_rounds
from .properties import PROPERTIES, run_properties
from .routes import fuzz_server

STATE = Path(__file__).resolve().parents[2] / ".fuzz.json"
HTTP, HARM = "http", "harm"
Totals = dict[str, float]
Round = Callable[[int, float], tuple[list[str], Totals]]


def main() -> int:
    options = _options()
    if options.case is not None:
        return _one_case(options)
    state: dict[str, Any] = json.loads(STATE.read_text()) if STATE.exists() else {}
    for what in _parts(options):
        with _rounds_of(what, options) as fuzz:
            for progress in _run(fuzz, state.setdefault(what, _fresh()), time.monotonic() + 60 * options.minutes):
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
    with harm_rounds(options.protocol[0], options.model) as attacks:
        lines = attacks.try_again(options.case, options.scale)
    print("\n".join(lines))
    return 1 if len(lines) > 1 else 0


def _run(fuzz: Round, progress: dict[str, Any], until_s: float) -> Iterator[dict[str, Any]]:
    while (started_s := time.monotonic()) < until_s:
        findings, totals = fuzz(progress["rounds"], until_s)
        progress["findings"] += findings
        progress["rounds"] += 1
        progress["minutes"] += (time.monotonic() - started_s) / 60
        _add(progress.setdefault("totals", {}), totals)
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
        with harm_rounds(what.split()[1], options.model) as attacks:
            yield attacks.round
    else:
        yield lambda number, until_s: (run_properties(what, number, until_s), {})


def _fresh() -> dict[str, Any]:
    return {"rounds": 0, "minutes": 0.0, "findings": []}


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
