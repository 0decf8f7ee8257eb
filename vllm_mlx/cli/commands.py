"""The commands of `vllm-mlx`. Imports no model code before a command needs it."""

from typing import Annotated

import typer

from .. import __version__
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


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"vllm-mlx {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Every setting is also an environment variable (`--max-num-seqs`: `VLLM_MLX_MAX_NUM_SEQS`) and a key of the "
    "TOML file (`max_num_seqs`). A flag wins over the environment, the environment over the file."
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
