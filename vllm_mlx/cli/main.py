"""The `vllm-mlx` command: its sub-commands, and how its process ends.

Nothing slow is imported before signals are handled, and no model code before a command needs it.
"""

import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .ending import end, reported

if TYPE_CHECKING:
    import typer

COMMANDS = ("serve", "launch", "chat", "models", "status", "doctor", "cache", "bench", "service", "worker")


def main() -> None:
    """Run the command that the arguments name. `serve` handles signals itself once it accepts requests."""
    is_server = sys.argv[1:2] in (["serve"], ["worker"]) or sys.argv[1:3] == ["service", "run"]
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
    from .doctor import SETTINGS as CHECKED
    from .doctor import doctor
    from .help import Command, Group, examples
    from .launch import launch
    from .models import EXAMPLE, models_app
    from .options import takes_settings
    from .service import service_app
    from .settings import NAMES, Settings
    from .status import status
    from .worker import SETTINGS, worker

    class InOrder(Group):
        """Lists the commands in the order in which a user needs them."""

        def list_commands(self, ctx: object) -> list[str]:
            return list(COMMANDS)

    app = typer.Typer(
        name="vllm-mlx",
        cls=InOrder,
        help="An inference server for Macs: models on MLX behind an OpenAI-compatible API.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=examples(f"serve {EXAMPLE}", f"launch claude --model {EXAMPLE}", 'chat "What is 2 + 3?"'),
    )
    flag = typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")

    @app.callback()
    def common(version: Annotated[bool, flag] = False) -> None:
        pass

    @app.command(
        epilog="Every setting is also an environment variable (`--max-num-seqs`: `VLLM_MLX_MAX_NUM_SEQS`) and a key of "
        "the TOML file (`max_num_seqs`). A flag wins over the environment, the environment over the file.\n\n"
        + examples(f"serve {EXAMPLE}", f"serve {EXAMPLE} --port 8001", "serve ~/models/mine --served-model-name mine")
    )
    @partial(takes_settings, names=NAMES - {"join"})
    def serve(settings: Settings) -> None:
        """Serve MODEL over HTTP until Ctrl-C. `NAME=MODEL` gives it a name, and several are served together."""
        from .serve import run_server

        run_server(settings)

    for command in (chat, launch, status, takes_settings(doctor, CHECKED), bench, takes_settings(worker, SETTINGS)):
        app.command()(command)
    for name, group in (("models", models_app), ("cache", cache_app), ("service", service_app)):
        app.add_typer(group, name=name, cls=Group)
    for each in (app, models_app, cache_app, service_app):
        for registered in each.registered_commands:
            registered.cls = Command
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        commit = _commit()
        print(f"vllm-mlx {__version__}" + (f" (commit {commit})" if commit else ""))
        sys.exit()


def _commit() -> str:
    """Return the commit that a wheel was built from, or that a clone has; empty if neither is known."""
    package = Path(__file__).parents[1]
    if (built := package / "commit.txt").exists():
        return built.read_text().strip()
    if not (package.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(package.parent), "rev-parse", "--short=10", "HEAD"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""
