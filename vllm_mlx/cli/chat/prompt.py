"""Reads a person's lines, with editing and the lines of earlier days where the terminal can. Knows no conversation."""

import contextlib
import os
from pathlib import Path

_MAX_LINES = 1000


class LinePrompt:
    """`remember` false: nothing is read from, or left on, the disk."""

    def __init__(self, *, remember: bool = True):
        self._file = history_file() if remember else None
        try:
            import readline
        except ImportError:  # some Pythons are built without it
            self._readline = None
            return
        self._readline = readline
        if self._file is not None:
            with contextlib.suppress(OSError):
                readline.read_history_file(self._file)

    def read(self) -> str | None:
        """A line, or several where each but the last ends in a backslash. None at the end of input."""
        lines: list[str] = []
        try:
            while True:
                line = input("› " if not lines else "… ")
                lines.append(line.removesuffix("\\"))
                if not line.endswith("\\"):
                    return "\n".join(lines)
        except EOFError:
            return None

    def save(self) -> None:
        if self._readline is None or self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch(mode=0o600)  # for its owner's eyes, before anything is in it
            self._readline.set_history_length(_MAX_LINES)
            self._readline.write_history_file(self._file)


def history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "vllm-mlx" / "chat-history"
