"""The `vllm-mlx` command: its sub-commands, and how its process ends.

Nothing slow is imported before signals are handled, and no model code before a command needs it.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

if TYPE_CHECKING:
    import typer

logger = logging.getLogger(__name__)


def main() -> None:
    """Run the command that the arguments name. `serve` handles signals itself once it accepts requests."""
    is_server = sys.argv[1:2] == ["serve"]
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in usual if is_server else (signal.SIGINT,):
        if usual[number] is not signal.SIG_IGN:  # nohup, and a shell without a terminal, ignore a signal
            signal.signal(number, lambda number, _: end(0 if number != signal.SIGINT else 128 + number))
    app = make_app()
    if not is_server:
        signal.signal(signal.SIGINT, usual[signal.SIGINT])
    try:
        reported(app)
    except SystemExit as done:
        if is_server:
            end(done.code if isinstance(done.code, int) else int(done.code is not None))
        raise


def make_app() -> "typer.Typer":
    """Make the Typer app of all commands."""
    import typer

    from .bench import bench
    from .cache import cache_app
    from .chat import chat
    from .doctor import doctor
    from .launch import launch
    from .models import models_app
    from .options import takes_settings
    from .settings import Settings
    from .status import status

    app = typer.Typer(
        name="vllm-mlx",
        help="An inference server for Macs: models on MLX behind an OpenAI-compatible API.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    flag = typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")

    @app.callback()
    def common(version: Annotated[bool, flag] = False) -> None:
        pass

    @app.command(
        epilog="Every setting is also an environment variable (`--max-num-seqs`: `VLLM_MLX_MAX_NUM_SEQS`) and a key of "
        "the TOML file (`max_num_seqs`). A flag wins over the environment, the environment over the file."
    )
    @takes_settings
    def serve(settings: Settings) -> None:
        """Serve MODEL over HTTP until Ctrl-C."""
        from .serve import run_server

        run_server(settings)

    for command in (chat, launch, status, doctor, bench):
        app.command()(command)
    app.add_typer(models_app, name="models")
    app.add_typer(cache_app, name="cache")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(f"vllm-mlx {__version__}")
        sys.exit()


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
    """End a server's process without Python's finalisation, which aborts if a thread is inside a library."""
    if code in (0, 128 + signal.SIGINT):
        logger.info("Stopped.")
    logging.shutdown()
    with suppress(OSError, AttributeError):  # the reader has left, or there is no stream
        sys.stdout.flush()
    os._exit(code)
