"""Output that nobody reads stops nobody."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from vllm_mlx.cli import output
from vllm_mlx.cli.output import Output, OutputHandler

ROOT = Path(__file__).parents[2]
SERVE = """
import logging, sys
from rich.console import Console
from tests.server.fakes import FakeEngine
from tests.support.running import named
from vllm_mlx.cli.output import write_last
from vllm_mlx.util.tenants import unnamed_keys
from vllm_mlx.cli.output import configure_logging
from vllm_mlx.server.app import create_app
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.run import listen, run

configure_logging("info")
sock = listen("127.0.0.1", 0)
engine = FakeEngine()
app = create_app(engine, ServerConfig(models=named("tiny"), api_keys=unnamed_keys(["k"])))
run(app, engine, sock, drain_s=0, started=lambda: print(sock.getsockname()[1], flush=True))
write_last("the last line")
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        yield started
        started.kill()


def refused(process: subprocess.Popen[str], num_requests: int) -> None:
    """So many log lines."""
    assert process.stdout is not None
    port = int(process.stdout.readline())
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
        for _ in range(num_requests):
            assert client.get("/v1/" + "x" * 4000).status_code == 401
        assert client.get("/health").status_code == 200


def test_a_log_that_nobody_reads_stops_neither_the_server_nor_its_end(process: subprocess.Popen[str]) -> None:
    refused(process, 250)
    process.terminate()
    process.wait(timeout=120)


def test_a_log_that_is_read_late_is_complete(process: subprocess.Popen[str]) -> None:
    refused(process, 250)
    assert process.stderr is not None
    lines = []
    while sum("status=401" in line for line in lines) < 250:  # the end of the process waits for a moment only
        lines.append(process.stderr.readline())
        assert lines[-1], "the log ended"
    assert max(map(len, lines)) < 600


def test_a_reader_who_left_harms_nothing(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    process.stderr.close()
    refused(process, 20)
    process.terminate()
    process.wait(timeout=120)


def take(reader: int, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= len(os.read(reader, num_bytes))


def test_what_does_not_fit_is_dropped_and_counted(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pipe
    monkeypatch.setattr(output, "MAX_BYTES", 200_000)
    logger = logging.Logger("test")
    handler = OutputHandler(writer)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    for number in range(400):
        logger.info("%s %s", number, "x" * 995)
    monkeypatch.setattr(output, "FLUSH_S", 0.0)
    handler.flush()
    taken = b""
    while b"dropped" not in taken:
        taken += os.read(reader, 1 << 20)
    *written, last = taken.decode().splitlines()
    numbers = [int(line.split()[1]) for line in written]
    assert numbers == sorted(numbers) and numbers[:190] == list(range(190))
    assert last == f"WARNING {400 - len(numbers)} lines of the log were dropped, because they were not read in time"
    logger.info("again")
    assert os.read(reader, 100) == b"INFO again\n"


def test_a_long_line_is_cut(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    handler = OutputHandler(writer)
    handler.emit(logging.makeLogRecord({"msg": "y" * 50_000}))
    handler.flush()
    line = os.read(reader, 60_000).decode()
    assert len(line) < output.MAX_LINE + 100 and "(33616 characters more)" in line


def test_flush_returns_once_all_is_written(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    one = Output(writer)
    one.write("a")
    one.write("b\n")
    assert one.flush(120) and os.read(reader, 10) == b"ab\n"
    one.write("x" * 200_000)
    assert not one.flush(0.0)
    take(reader, 200_000)
    assert one.flush(120)


def test_a_terminal_that_does_not_block_is_waited_for(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.set_blocking(writer, False)
    one = Output(writer)
    one.write("x" * 200_000)
    take(reader, 200_000)
    assert one.flush(120)


def test_a_log_whose_stream_the_shell_closed_goes_nowhere() -> None:
    program = "from vllm_mlx.cli.output import configure_logging as c; import logging; c('info'); logging.warning('x')"
    process = subprocess.run(f'{sys.executable} -c "{program}" 2>&-', shell=True, timeout=60, check=False)
    assert process.returncode == 0
