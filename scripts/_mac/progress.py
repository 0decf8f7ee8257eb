"""Facts about the machine; results of checks in a file that survives its restart, and the report made from them."""

import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm_mlx.util.fence import Fence

IS_MAC = sys.platform == "darwin"
PACKAGES = ("vllm-mlx-server", "mlx", "mlx-metal", "mlx-lm", "mlx-vlm", "transformers", "llguidance")


@dataclass(frozen=True, slots=True)
class Footprint:
    peak_bytes: int
    num_regions: int | None  # None if `footprint` listed no categories


@dataclass(frozen=True, slots=True)
class VirtualMemory:
    wired_bytes: int
    cached_bytes: int  # parts of files


def output_of(*command: str) -> str:
    """Return the output of a tool. It is empty if this machine does not have the tool, or if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def parse_footprint(text: str) -> Footprint | None:
    """Read `footprint -f bytes -p PID`."""
    peak = re.search(r"^\s*phys_footprint_peak:\s*(\d+) B", text, re.M)
    total = re.search(r"(\d+)\s+TOTAL\s*$", text, re.M)
    return None if peak is None else Footprint(int(peak[1]), int(total[1]) if total else None)


def parse_vm_stat(text: str) -> VirtualMemory | None:
    page = re.search(r"page size of (\d+) bytes", text)
    pages = {name: int(count) for name, count in re.findall(r'^"?([^:"]+)"?:\s+(\d+)\.', text, re.M)}
    names = ("Pages wired down", "File-backed pages")
    if page is None or not all(name in pages for name in names):
        return None
    return VirtualMemory(*(int(page[1]) * pages[name] for name in names))


def parse_boot_time(text: str) -> int | None:
    """Read `sysctl -n kern.boottime`: seconds since 1970."""
    found = re.search(r"\bsec = (\d+)", text)
    return int(found[1]) if found else None


def parse_power(text: str) -> str | None:
    """Read `pmset -g batt`: "AC Power" or "Battery Power"."""
    found = re.search(r"drawing from '([^']+)'", text)
    return found[1] if found else None


def footprint(pid: int) -> Footprint | None:
    return parse_footprint(output_of("/usr/bin/footprint", "-f", "bytes", "-p", str(pid)))


def virtual_memory() -> VirtualMemory | None:
    return parse_vm_stat(output_of("/usr/bin/vm_stat"))


def boot_time() -> int | None:
    """Return the time at which the machine was started, or None if that cannot be read."""
    if IS_MAC:
        return parse_boot_time(sysctl("kern.boottime"))
    found = re.search(r"^btime (\d+)", output_of("cat", "/proc/stat"), re.M)
    return int(found[1]) if found else None


def sysctl(name: str) -> str:
    return output_of("/usr/sbin/sysctl", "-n", name).strip()


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe() -> dict[str, str]:
    """Return the machine and the versions, for a report: no serial number, no name of a user or a machine."""
    facts = {
        "chip": sysctl("machdep.cpu.brand_string") or platform.machine(),
        "model": sysctl("hw.model"),
        "system": f"macOS {platform.mac_ver()[0]}" if IS_MAC else f"{platform.system()} {platform.release()}",
        "memory": f"{memory_bytes() / 2**30:.0f} GiB",
        "iogpu.wired_limit_mb": sysctl("iogpu.wired_limit_mb"),
        "power": parse_power(output_of("/usr/bin/pmset", "-g", "batt")) or "",
        "bash": output_of("/bin/bash", "-c", "printf %s $BASH_VERSION"),
        "Python": platform.python_version(),
        "commit": output_of("git", "rev-parse", "--short", "HEAD").strip(),
        **{name: version_of(name) for name in PACKAGES},
    }
    return {name: value for name, value in facts.items() if value}


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def without_names(text: str) -> str:
    """Remove the user's folder, and so the user's name, from a text that a report may quote."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


_CLOCK_S = 60  # an adjusted clock moves the time at which the machine seems to have started


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    FIGURE = "figure"  # nothing is demanded of it
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    outcome: Outcome
    text: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    purpose: str  # one sentence
    minutes: float  # about, on a Mac
    run: Callable[[], Result]
    needs_metal: bool = False
    is_risky: bool = False  # the machine may restart in it: it is not tried again


def verdict(is_right: bool, text: str) -> Result:
    return Result(Outcome.PASS if is_right else Outcome.FAIL, text)


class Progress:
    """Owns the file. A check is written there before it runs, so that a restart of the machine leaves a trace."""

    def __init__(self, file: Path):
        self._file = file
        self._running: dict[str, int | str | None] | None = None
        self.results: dict[str, Result] = {}
        if file.exists():
            state = json.loads(file.read_text(encoding="utf-8"))
            self._running = state["running"]
            self.results = {name: Result(**result) for name, result in state["results"].items()}

    def run(self, checks: Sequence[Check], *, has_metal: bool, say: Callable[[str], None]) -> None:
        """Run the checks that have no result yet."""
        self._note_interruption(checks, say)
        left = [check for check in checks if check.name not in self.results]
        if num_done := len(checks) - len(left):
            say(f"{num_done} checks have results of an earlier run.")
        for number, check in enumerate(left):
            minutes = sum(later.minutes for later in left[number:])
            say(f"[{number + 1}/{len(left)}] {check.name}: {check.purpose} About {minutes:.0f} min left.")
            result = self._run(check, has_metal)
            say(f"    {result.outcome.upper()}: {result.text}")

    def _run(self, check: Check, has_metal: bool) -> Result:
        if check.needs_metal and not has_metal:
            return self._keep(check.name, Result(Outcome.SKIPPED, "This needs a Mac with Metal."))
        self._running = {"name": check.name, "boot": boot_time()}
        self._save()
        start = time.monotonic()
        result = None
        with Fence("the checks that follow") as fence:
            result = check.run()
        if result is None:
            result = Result(Outcome.FAIL, f"{type(fence.error).__name__}: {str(fence.error)[:500]}")
        return self._keep(check.name, Result(result.outcome, result.text, round(time.monotonic() - start, 1)))

    def _note_interruption(self, checks: Sequence[Check], say: Callable[[str], None]) -> None:
        running, self._running = self._running, None
        check = None if running is None else next((check for check in checks if check.name == running["name"]), None)
        if running is None or check is None:
            return
        if _has_restarted(running["boot"]):
            result = Result(Outcome.FAIL, "The machine restarted while this ran.")
        elif check.is_risky:
            result = Result(Outcome.FAIL, "The last run ended in this check, without a restart of the machine.")
        else:
            return  # it was stopped by hand: it runs again
        say(f"{check.name}: {self._keep(check.name, result).text}")

    def _keep(self, name: str, result: Result) -> Result:
        self.results[name], self._running = result, None
        self._save()
        return result

    def _save(self) -> None:
        state = {"running": self._running, "results": {name: asdict(result) for name, result in self.results.items()}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._file.with_suffix(".fresh")
        with fresh.open("w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
            file.flush()
            _flush(file.fileno())
        fresh.replace(self._file)
        folder = os.open(self._file.parent, os.O_RDONLY)
        _flush(folder)
        os.close(folder)


def _flush(descriptor: int) -> None:
    """Write to the disk itself. macOS's fsync stops at the drive's cache, and not every file system offers more."""
    try:
        fcntl.fcntl(descriptor, getattr(fcntl, "F_FULLFSYNC", -1))
    except OSError:
        os.fsync(descriptor)


def _has_restarted(since: object) -> bool:
    now = boot_time()
    return isinstance(since, int) and now is not None and abs(now - since) > _CLOCK_S


def report(results: Mapping[str, Result], models: Mapping[str, str], by_hand: Sequence[str]) -> str:
    """Markdown for an issue."""
    facts = "\n".join(f"| {name} | {value} |" for name, value in {**describe(), **models}.items())
    rows = "\n".join(
        f"| {name} | {result.outcome} | {' '.join(result.text.replace('|', '/').split())} | {result.seconds:.0f} s |"
        for name, result in results.items()
    )
    hands = "\n".join(f"- {item}" for item in by_hand)
    return without_names(
        f"## Checks on a Mac\n\n| machine | |\n|---|---|\n{facts}\n\n"
        f"| check | outcome | what was found | time |\n|---|---|---|---|\n{rows}\n\n"
        f"### By hand\n\n{hands}\n"
    )
