"""Rounds of fuzzing until the time is up. Goes on where it stopped: a round draws by its number, findings are kept.

http: requests to each route of a served checkpoint. The others: the tests that draw their inputs, with more of them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .properties import PROPERTIES, run_properties
from .served import fuzz_server

STATE = Path(__file__).resolve().parents[2] / ".fuzz.json"
HTTP = "http"
Round = Callable[[int, float], list[str]]


def main() -> int:
    options = _options()
    state: dict[str, Any] = json.loads(STATE.read_text()) if STATE.exists() else {}
    for what in options.what or [HTTP, *PROPERTIES]:
        with _rounds_of(what, options) as fuzz:
            for progress in _run(fuzz, state.setdefault(what, _fresh()), time.monotonic() + 60 * options.minutes):
                _save(what, progress)
                print(f"{what}: {progress['rounds']} rounds, {progress['minutes']:.1f} min", flush=True)
    findings = [finding for progress in state.values() for finding in progress["findings"]]
    print("\n".join([*findings, f"{len(findings)} findings"]))
    return 1 if findings else 0


def _run(fuzz: Round, progress: dict[str, Any], until_s: float) -> Iterator[dict[str, Any]]:
    while (started_s := time.monotonic()) < until_s:
        progress["findings"] += fuzz(progress["rounds"], until_s)
        progress["rounds"] += 1
        progress["minutes"] += (time.monotonic() - started_s) / 60
        yield progress


@contextmanager
def _rounds_of(what: str, options: argparse.Namespace) -> Iterator[Round]:
    if what == HTTP:
        with fuzz_server(options.model, options.examples) as fuzz:
            yield fuzz
    else:
        yield partial(run_properties, what)


def _fresh() -> dict[str, Any]:
    return {"rounds": 0, "minutes": 0.0, "findings": []}


def _save(what: str, progress: dict[str, Any]) -> None:
    """Beside what another process, that fuzzes something else, has saved meanwhile."""
    saved = json.loads(STATE.read_text()) if STATE.exists() else {}
    STATE.write_text(json.dumps({**saved, what: progress}, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--what", action="append", choices=[HTTP, *PROPERTIES], help="one or more (default: all)")
    parser.add_argument("--minutes", type=float, default=30, help="how long each is tried (default: 30)")
    parser.add_argument("--examples", type=int, default=50, help="requests to each route in a round (default: 50)")
    parser.add_argument("--model", default="demo", help="checkpoint to serve (default: demo)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
