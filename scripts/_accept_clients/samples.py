"""Installs client packages and runs the samples of their READMEs against a server. Knows no package."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .install import trouble_of
from .outside import walled_in
from .packages import Package, Program, programs
from .processes import run_program
from .relay import Relay, relaying

# Runs in the package's own Python. A part with `await` outside a function is a coroutine.
_RUNNER = """
import ast, asyncio, inspect, json, sys
names = {"__name__": "__main__"}
for part in json.load(sys.stdin):
    code = compile(part, "README", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a sample came to. `requests`: the path and status of each."""

    program: Program
    exit_code: int | None  # None: it had to be ended
    requests: tuple[tuple[str, int], ...]
    output: str
    wall_s: float

    @property
    def is_accepted(self) -> bool:
        was_answered = any(status == 200 for _, status in self.requests)
        return self.exit_code == 0 and (was_answered or not self.program.asks)


def install_package(package: Package, folder: Path) -> str | None:
    """An environment of its own for a package. Returns why it cannot be installed."""
    place = _venv(package, folder)
    if _readme(package, folder) is not None:
        return None
    pip = [str(place / "bin" / "pip"), "install", "-q"]
    return (
        trouble_of([sys.executable, "-m", "venv", "--clear", str(place)])
        or trouble_of([*pip, *package.requirements])
        or (trouble_of([*pip, "--no-deps", *package.unpinned]) if package.unpinned else None)
    )


def python_of(package: Package, folder: Path) -> Path:
    return _venv(package, folder) / "bin" / "python"


def programs_of(package: Package, folder: Path) -> Sequence[Program]:
    readme = _readme(package, folder)
    assert readme is not None, "the package is installed"
    return list(programs(package, readme))


def run_sample(program: Program, python: Path, url: str, limit_s: float) -> Ran:
    """`python` is the interpreter for which the package is installed."""
    relay = Relay(url)
    with (
        tempfile.TemporaryDirectory(prefix="sample-") as place,
        relaying(relay) as address,
        walled_in([]) as proxies,
    ):
        started_s = time.monotonic()
        code, output = run_program(
            [str(python), "-c", _RUNNER],
            limit_s=limit_s,
            environment={**_environment(address, place), **proxies},
            folder=Path(place),
            input_text=json.dumps(program.parts),
        )
        wall_s = time.monotonic() - started_s
    return Ran(program, code, tuple((seen.path, seen.status) for seen in relay.seen), output, wall_s)


def _environment(url: str, home: str) -> dict[str, str]:
    """The address in every variable that one of the packages reads."""
    return {
        "HOME": home,
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), "none"),
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{url}/v1"),
        **dict.fromkeys(("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE"), url),
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _venv(package: Package, folder: Path) -> Path:
    return folder / f"venv-{package.name}"


def _readme(package: Package, folder: Path) -> str | None:
    """The README that the installed version came with; None: it is not installed."""
    name = package.name.replace("-", "_")
    pattern = f"lib/*/site-packages/{name}-{package.version}.dist-info/METADATA"
    found = next(iter(_venv(package, folder).glob(pattern)), None)
    return None if found is None else found.read_text(encoding="utf-8").partition("\n\n")[2]
