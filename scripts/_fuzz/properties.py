"""The tests that draw their own inputs, run with another seed and more of them in each round."""

import resource
import subprocess
import sys
from pathlib import Path

from tests.support.drawing import LONG

ROOT = Path(__file__).resolve().parents[2]
HANGS_S = 1800  # one property
MAX_MB = 2048  # of the process, of which most is libraries
PROPERTIES = {
    "parsers": ("tests/formats/test_properties.py", "tests/formats/test_all_formats.py"),
    "decoders": ("tests/api/test_any_body.py", "tests/api/test_any_agent_body.py", "tests/server/test_bodies.py"),
    "templates": ("tests/prompt/test_any_template.py", "tests/prompt/test_any_conversation.py"),
    "schemas": ("tests/guidance/test_any_schema.py",),
    "images": ("tests/media/test_anything.py",),
    "load": ("tests/engine/test_any_load.py",),
}


def run_properties(what: str, number: int, until_s: float) -> list[str]:
    """Return the tests that failed, hung, or took too much memory. A round that has begun is completed."""
    command = [sys.executable, "-m", "pytest", f"--hypothesis-profile={LONG}", f"--hypothesis-seed={number}"]
    command += [f"--timeout={HANGS_S}", *PROPERTIES[what]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    findings = [] if done.returncode == 0 else [f"{what} (round {number}): {done.stdout[-4000:]}"]
    if (peak_mb := _peak_mb()) > MAX_MB:
        findings.append(f"{what} (round {number}): {peak_mb} MB")
    return findings


def _peak_mb() -> int:
    """Return the peak memory of the largest child that has ended, in MB."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak >> (20 if sys.platform == "darwin" else 10)
