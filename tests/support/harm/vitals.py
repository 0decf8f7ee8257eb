"""Memory, processor time and command line of a process, from /proc, or from `ps` where there is none (macOS)."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Vitals:
    pid: int

    def memory_bytes(self) -> int:
        """The resident memory. 0 once the process has ended."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except OSError:
            return int(self._ps("rss") or 0) << 10

    def command_line(self) -> str:
        """The words of the command, with spaces between. Empty once the process has ended."""
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            return self._ps("args")

    def cpu_s(self) -> float:
        """Processor time of all threads since the process started."""
        return self._times(f"/proc/{self.pid}/stat")

    def loop_cpu_s(self) -> float:
        """Processor time of the main thread, on which the event loop runs. 0 where the system does not tell."""
        return self._times(f"/proc/{self.pid}/task/{self.pid}/stat", fallback=False)

    def _times(self, path: str, *, fallback: bool = True) -> float:
        try:
            fields = Path(path).read_text().rpartition(")")[2].split()
        except OSError:
            return _seconds(self._ps("time")) if fallback else 0.0
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def _ps(self, field: str) -> str:
        command = ["ps", "-o", f"{field}=", "-p", str(self.pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _seconds(clock: str) -> float:
    """Of `[[dd-]hh:]mm:ss[.cc]`."""
    days, _, rest = clock.rpartition("-")
    seconds = 0.0
    for part in rest.split(":") if rest else ():
        seconds = 60 * seconds + float(part)
    return seconds + 86400 * int(days or 0)
