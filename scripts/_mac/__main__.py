"""The command behind `scripts/check --mac`: the checks that only a Mac can answer, one after the other.

A run that was interrupted goes on where it stopped. The report is Markdown, made to be pasted into an issue.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from .checks import ROOT, SMALL, WARNING, MacChecks, Sizes, Wiring
from .progress import IS_MAC, Check, Outcome, Progress, memory_bytes, report

_FOLDER = ROOT / ".mac-check"
_LARGE_MAC_BYTES = 15 << 30
BY_HAND = (
    "Close the lid during a reply and open it again: the reply goes on, or ends with an error; the next one is right.",
    "Let the display sleep during a long reply: the reply goes on.",
    "Keep the display on, and watch it while `--only long-prompt` runs: it must not freeze for seconds. Do it with the "
    "largest model that fits, too (`--model`): a Qwen3.6 has the widest attention.",
    "Run `sudo footprint -w -p PID` right after the start and after an hour of load: nothing more is wired.",
    "Without uv and Homebrew (`PATH=/usr/bin:/bin scripts/serve --help` in a fresh clone), one paragraph says what to "
    "install, or the help is printed.",
)


def main() -> int:
    options = _options()
    models = _models(options)
    log = options.folder / "server.log"
    if options.wiring:
        minutes = options.minutes if options.minutes is not None else 5.0
        wiring = Wiring(model=models["model"], log=log, minutes=minutes)
        if not IS_MAC:
            wiring = replace(wiring, prompt_tokens=300)
        checks = wiring.checks()
    else:
        sizes = Sizes() if IS_MAC and not options.small else SMALL
        checks = MacChecks(**models, sizes=sizes, log=log).all()
    checks = _chosen(checks, options.only)
    if options.dry_run:
        return _explain(checks)
    if options.wiring and not _may_risk(options.yes):
        return 1
    return _run(checks, options, models)


def _run(checks: Sequence[Check], options: argparse.Namespace, models: dict[str, str]) -> int:
    state = options.folder / "results.json"
    if options.again:
        state.unlink(missing_ok=True)
    if IS_MAC:
        subprocess.Popen(["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())])
    progress = Progress(state)
    try:
        progress.run(checks, has_metal=mx.metal.is_available(), say=_say)
    finally:
        file = options.folder / "report.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(report(progress.results, models, BY_HAND), encoding="utf-8")
        _say(f"\nThe report: {file}. To begin again: --again.")
    return int(any(progress.results[check.name].outcome is Outcome.FAIL for check in checks))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/check --mac", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wiring", action="store_true", help="run only the experiment about wired weights")
    parser.add_argument("--minutes", type=float, help="wiring: minutes of each arm (default: 5)")
    parser.add_argument("--yes", action="store_true", help="wiring: do not ask whether the Mac may restart")
    parser.add_argument("--dry-run", action="store_true", help="print the checks without running them")
    parser.add_argument("--only", metavar="NAMES", help="run only these checks, separated by commas")
    parser.add_argument("--again", action="store_true", help="forget the results of earlier runs")
    parser.add_argument("--small", action="store_true", help="use short prompts and replies, the default without a Mac")
    parser.add_argument("--model", help="checkpoint to serve (default: by memory; without a Mac the demo)")
    parser.add_argument("--vision-model", help="a Qwen-VL (default: one of 3B in 4 bits)")
    parser.add_argument("--bf16-model", help="an unquantised checkpoint (default: one of 0.6B)")
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="of results, report and log (default: .mac-check)")
    return parser.parse_args()


def _models(options: argparse.Namespace) -> dict[str, str]:
    size = "8B" if memory_bytes() > _LARGE_MAC_BYTES else "0.6B"
    defaults = {
        "model": f"mlx-community/Qwen3-{size}-4bit",
        "vision_model": "mlx-community/Qwen2.5-VL-3B-Instruct-4bit",
        "bf16_model": "mlx-community/Qwen3-0.6B-bf16",
    }
    return {name: getattr(options, name) or (default if IS_MAC else "demo") for name, default in defaults.items()}


def _chosen(checks: list[Check], only: str | None) -> list[Check]:
    if only is None:
        return checks
    names = only.split(",")
    if unknown := set(names) - {check.name for check in checks}:
        sys.exit(f"No check is called {', '.join(sorted(unknown))}. There are: {', '.join(c.name for c in checks)}.")
    return [check for check in checks if check.name in names]


def _explain(checks: Sequence[Check]) -> int:
    for check in checks:
        note = " Needs Metal." if check.needs_metal else " The machine may restart." if check.is_risky else ""
        _say(f"{check.name:12} {check.minutes:3.0f} min  {check.purpose}{note}")
    _say("By hand: " + " ".join(BY_HAND))
    return 0


def _may_risk(is_agreed: bool) -> bool:
    _say(WARNING)
    if is_agreed:
        return True
    if not sys.stdin.isatty():
        _say("There is no terminal to ask at. To go on, give --yes.")
        return False
    return input("Go on? [y/N] ").strip().lower() in ("y", "yes")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
