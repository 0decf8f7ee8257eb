"""A command in a terminal of its own, and the person before it: what is typed, what is seen. Knows no test."""

import codecs
import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.commands import COMMAND

SECONDS = 60  # until a test is said to hang


class Terminal:
    def __init__(self, file: int, process: subprocess.Popen[bytes]):
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
        self.process = process
        self.seen = ""

    def type(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def press(self, character: bytes) -> None:
        os.write(self._file, character)

    def wait_for(self, pattern: str) -> str:
        """What was seen up to the pattern; it is not seen again."""
        end = time.monotonic() + SECONDS
        while (match := re.search(pattern, self.seen)) is None:
            self.seen += self._read(end - time.monotonic())
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def _read(self, wait_s: float) -> str:
        can_read, _, _ = select.select([self._file], [], [], max(wait_s, 0))
        assert can_read, f"Nothing more came: {self.seen!r}"
        try:
            data = os.read(self._file, 65536)
        except OSError:  # Linux: nobody holds the other end
            data = b""
        assert data, f"It ended: {self.seen!r}"
        return self._decoder.decode(data)


@contextmanager
def terminal(*arguments: str, columns: int = 200) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
