"""Writes to a terminal, pipe or file from a thread, so that a stopped reader blocks no caller. Knows no command."""

import contextlib
import itertools
import logging
import os
import select
import shutil
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from ..core.stage import LoadStage
from .terminal import printable

logger = logging.getLogger(__name__)
MAX_BYTES = 4 << 20  # bytes that may wait to be written; further lines are dropped and counted
MAX_LINE = 16 * 1024  # characters of one line, stack traces included
LOG_BYTES = 10_000_000  # of one file of a service's log
LOG_FILES = 5
LOOK_S = 0.2  # between two looks at the stage of loading
_CLEAR = "\r\x1b[K"  # removes the terminal's last line
FLUSH_S = 1.0  # how long the end of the process waits for a reader, who may have stopped


def descriptor_of(stream: TextIO | None) -> int:
    """Return the descriptor of a standard stream. If the shell closed it (`2>&-`), it is that of /dev/null."""
    return os.open(os.devnull, os.O_WRONLY) if stream is None else stream.fileno()


class Output:
    """One file descriptor and the thread that writes to it. The thread is a daemon: the process can end while it runs.

    `notice` makes the line that says how many lines were dropped. It is written once the reader has caught up.
    `before` is called with the number of bytes before they are written.
    """

    def __init__(
        self, fd: int, *, notice: Callable[[int], str] | None = None, before: Callable[[int], None] | None = None
    ) -> None:
        self._fd = fd
        self._notice = notice
        self._before = before
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0  # size of the lines that wait or are being written
        self._num_dropped = 0
        self._writer: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Queue a text and return immediately. The text is dropped if too much waits already."""
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._num_bytes + len(data) > MAX_BYTES:
                self._num_dropped += 1
                return
            self._put(data)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name=f"output-{self._fd}", daemon=True)
                self._writer.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written. Returns False if the reader did not take it in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._num_bytes:
                if not self._changed.wait(max(0.0, deadline_s - time.monotonic())) and time.monotonic() >= deadline_s:
                    return False
        return True

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._num_bytes += len(data)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                data = self._waiting.popleft()
            with contextlib.suppress(OSError):  # the reader or the terminal is gone
                if self._before is not None:
                    self._before(len(data))
                _write(self._fd, data)
            with self._changed:
                self._num_bytes -= len(data)
                if self._num_dropped and not self._waiting:
                    if self._notice is not None:
                        self._put(self._notice(self._num_dropped).encode())
                    self._num_dropped = 0
                self._changed.notify_all()


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another program made the terminal non-blocking
            select.select([], [fd], [])


class OutputHandler(logging.StreamHandler[Output]):
    """A log handler whose lines an `Output` writes, so that logging never waits."""

    def __init__(self, fd: int, before: Callable[[int], None] | None = None) -> None:
        super().__init__(Output(fd, notice=self._notice, before=before))
        self.is_terminal = os.isatty(fd) and os.environ.get("TERM") != "dumb"
        self._clear = ""  # written before a line, if the terminal's last line shows a stage

    def format(self, record: logging.LogRecord) -> str:
        line, row = super().format(record), getattr(record, "row", None)
        if self.is_terminal:
            clock = time.strftime("%H:%M:%S", time.localtime(record.created))
            line = f"{clock} {row or line.partition(' ')[2].partition(' ')[2]}"
        line = line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}… ({len(line) - MAX_LINE} characters more)"
        return f"{self._clear}{line}"

    @contextlib.contextmanager
    def showing(self, stage: LoadStage) -> Iterator[None]:
        """Show the stage of loading inside the block: on one line of a terminal, elsewhere on a line per stage."""
        ended = threading.Event()
        thread = threading.Thread(target=self._show, args=(stage, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _show(self, stage: LoadStage, ended: threading.Event) -> None:
        told = ""
        while not ended.wait(LOOK_S):
            if stage.name and self.is_terminal:
                self._clear = _CLEAR
                self.stream.write(f"{_CLEAR}{printable(f'Loading {stage}')[: shutil.get_terminal_size().columns - 1]}")
            elif stage.name != told:
                told = stage.name
                logger.info("Loading %s: %s", stage.model, told)
        self.stream.write(self._clear)
        self._clear = ""

    def flush(self) -> None:
        """Do nothing, because the thread writes each line."""

    def close(self) -> None:
        """Wait for the last lines, within limits. The end of the process calls this."""
        self.stream.flush(FLUSH_S)
        super().close()

    def _notice(self, num_dropped: int) -> str:
        text = f"{num_dropped} lines of the log were dropped, because they were not read in time"
        record = logging.makeLogRecord({"levelno": logging.WARNING, "levelname": "WARNING", "msg": text})
        return f"{self.format(record)}\n"


def write_last(message: str) -> None:
    """Write the last message of a process, after its log. Give up if it is not read in time."""
    logging.shutdown()
    last = Output(descriptor_of(sys.stderr))
    text = printable(f"vllm-mlx: {message}")
    if sys.stderr is not None and sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    last.write(f"{text}\n")
    last.flush(FLUSH_S)


class LogFile:
    """A log in files of a bounded size, for a process whose standard output and error both go there.

    `path` gets the newest lines. When it is full, it is renamed to `path.1`, and so on; the oldest file is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> None:
        """Make the newest file the standard output and error of this process. Raises OSError."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        for stream in (1, 2):
            os.dup2(fd, stream)
        os.close(fd)

    def make_room(self, num_bytes: int) -> None:
        """Begin a new file if the newest one would grow above its size. Raises OSError."""
        if os.fstat(2).st_size + num_bytes > LOG_BYTES:
            for older, newer in itertools.pairwise(log_files(self._path)):
                with contextlib.suppress(FileNotFoundError):
                    newer.replace(older)
            self.open()


def log_files(path: Path) -> list[Path]:
    """Return the names that a log's files may have, the oldest lines first."""
    return [*(path.with_name(f"{path.name}.{number}") for number in range(LOG_FILES - 1, 0, -1)), path]


def configure_logging(level: str, log: LogFile | None = None) -> OutputHandler:
    """Log our own messages at `level`, and of libraries only warnings and errors."""
    handler = OutputHandler(descriptor_of(sys.stderr), None if log is None else log.make_room)
    logging.basicConfig(handlers=[handler], format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.captureWarnings(True)
    logging.getLogger("vllm_mlx").setLevel(level.upper())
    return handler
