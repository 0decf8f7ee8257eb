"""The end of a command's process: one line for an error, and an exit code. Importing this takes no time."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

logger = logging.getLogger(__name__)


def reported(command: Callable[[], object]) -> None:
    """Run a command whose errors become one line and an exit code."""
    from ..core.errors import VLLMMLXError
    from .output import write_last
    from .terminal import ExitCode, exit_code_of

    try:
        command()
    except VLLMMLXError as error:
        write_last(error.message)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


def end(code: int) -> NoReturn:
    """End a server's process without Python's finalisation, which aborts if a thread is inside a library."""
    if code in (0, 128 + signal.SIGINT):
        logger.info("Stopped.")
    logging.shutdown()
    with suppress(OSError, AttributeError):  # the reader has left, or there is no stream
        sys.stdout.flush()
    os._exit(code)
