"""The entry of the `vllm-mlx` command: how its process ends. Nothing slow is imported before signals are handled."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

logger = logging.getLogger(__name__)


def main() -> None:
    """Run the command of the arguments. `serve` handles signals itself once it accepts requests."""
    is_server = sys.argv[1:2] == ["serve"]
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in usual if is_server else (signal.SIGINT,):
        if usual[number] is not signal.SIG_IGN:  # nohup, and a shell without a terminal, leave it so
            signal.signal(number, lambda number, _: end(0 if number != signal.SIGINT else 128 + number))
    from .commands import app

    if not is_server:
        signal.signal(signal.SIGINT, usual[signal.SIGINT])
    try:
        reported(app)
    except SystemExit as done:
        if is_server:
            end(done.code if isinstance(done.code, int) else int(done.code is not None))
        raise


def reported(command: Callable[[], object]) -> None:
    """Run a command whose errors become one line and an exit code."""
    from ..core.errors import VLLMMLXError
    from .output import descriptor_of, write_last
    from .terminal import ExitCode, exit_code_of, printable

    try:
        command()
    except VLLMMLXError as error:
        write_last(descriptor_of(sys.stderr), f"vllm-mlx: {printable(error.message)}\n")
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


def end(code: int) -> NoReturn:
    """End a server's process without Python's own end, which aborts where a thread is inside of a library."""
    if code in (0, 128 + signal.SIGINT):
        logger.info("Stopped.")
    logging.shutdown()
    with suppress(OSError, AttributeError):  # its reader has left, or the stream is missing
        sys.stdout.flush()
    os._exit(code)
