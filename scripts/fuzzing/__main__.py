"""Rounds of fuzzing until the time is up: routes of a served checkpoint, then the tests that draw their own inputs."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from tests.server.running import serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.async_engine import AsyncEngine

from .routes import Finding, fuzz_operation, operations

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".fuzz.json"
PROPERTIES = ("tests/api", "tests/parsers/test_properties.py", "tests/processing/test_any_conversation.py",
              "tests/processing/images/test_anything.py")  # fmt: skip


def main() -> int:
    options = _options()
    state = json.loads(STATE.read_text()) if STATE.exists() else {"round": 0, "minutes": 0.0, "findings": []}
    until_s = time.monotonic() + 60 * options.minutes
    config = EngineConfig(model=options.model, memory_budget_bytes=2 << 30, max_model_len=2048, max_request_s=20)
    with serving(AsyncEngine.start(config), served_model_names=("tiny",)) as server:
        while time.monotonic() < until_s:
            started_s = time.monotonic()
            state["findings"] += _round(server.url, state["round"], options.examples, until_s)
            state["round"] += 1
            state["minutes"] += (time.monotonic() - started_s) / 60
            STATE.write_text(json.dumps(state, indent=1))
            print(f"round {state['round']}, {state['minutes']:.1f} min, {len(state['findings'])} findings", flush=True)
    for finding in state["findings"]:
        print(finding)
    return 1 if state["findings"] else 0


def _round(url: str, number: int, num_examples: int, until_s: float) -> list[str]:
    findings = []
    for label, operation in operations(url):
        if time.monotonic() > until_s:
            return findings
        try:
            fuzz_operation(operation, url, number=number, num_examples=num_examples)
        except Finding as finding:
            findings.append(f"{label} (round {number}): {finding}")
    command = [sys.executable, "-m", "pytest", "-k", "any or drawn or property", f"--hypothesis-seed={number}"]
    done = subprocess.run([*command, *PROPERTIES], cwd=ROOT, capture_output=True, text=True, check=False)
    return findings if done.returncode in (0, 5) else [*findings, f"tests (round {number}): {done.stdout[-2000:]}"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="how long this part runs (default: 30)")
    parser.add_argument("--examples", type=int, default=50, help="requests to each route in a round (default: 50)")
    parser.add_argument("--model", default="demo", help="checkpoint to serve (default: demo)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
