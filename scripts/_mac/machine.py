"""Facts about the machine and a process, from the output of macOS's tools. Elsewhere, Python supplies some of them."""

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

IS_MAC = sys.platform == "darwin"
PACKAGES = ("vllm-mlx-server", "mlx", "mlx-metal", "mlx-lm", "mlx-vlm", "transformers", "llguidance")


@dataclass(frozen=True, slots=True)
class Footprint:
    num_bytes: int
    peak_bytes: int
    num_regions: int | None  # None if `footprint` listed no categories


@dataclass(frozen=True, slots=True)
class VirtualMemory:
    free_bytes: int
    wired_bytes: int
    compressed_bytes: int


def output_of(*command: str) -> str:
    """Return the output of a tool. It is empty if this machine does not have the tool, or if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def parse_footprint(text: str) -> Footprint | None:
    """Read `footprint -f bytes -p PID`."""
    now, peak = (re.search(rf"^\s*{name}:\s*(\d+) B", text, re.M) for name in ("phys_footprint", "phys_footprint_peak"))
    total = re.search(r"(\d+)\s+TOTAL\s*$", text, re.M)
    if now is None or peak is None:
        return None
    return Footprint(int(now[1]), int(peak[1]), int(total[1]) if total else None)


def parse_vm_stat(text: str) -> VirtualMemory | None:
    page = re.search(r"page size of (\d+) bytes", text)
    pages = {name: int(count) for name, count in re.findall(r'^"?([^:"]+)"?:\s+(\d+)\.', text, re.M)}
    names = ("Pages free", "Pages wired down", "Pages occupied by compressor")
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


def cached_file_bytes() -> int | None:
    """Return the memory that holds parts of files. Returns None without `vm_stat`."""
    return parse_cached_files(output_of("vm_stat"))


def parse_cached_files(text: str) -> int | None:
    page = re.search(r"page size of (\d+) bytes", text)
    pages = re.search(r"^File-backed pages:\s+(\d+)\.", text, re.M)
    return None if page is None or pages is None else int(page[1]) * int(pages[1])


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
