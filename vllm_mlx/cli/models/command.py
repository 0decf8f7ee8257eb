"""`vllm-mlx models`: the checkpoints on this machine, and fetching one. Loads none."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from ..banner import readable
from ..failures import WrongUsage
from ..terminal import console
from .cached import CachedModel, cache_folder, cached_models
from .describe import Description, describe

models_app = typer.Typer(help="List the checkpoints on this machine, or fetch one.", invoke_without_command=True)


@models_app.callback()
def models(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    found = cached_models()
    if as_json:
        print(json.dumps([_fields(model) for model in found], indent=2))
    elif not found:
        print(f"No checkpoint lies in {cache_folder()}. Fetch one with `vllm-mlx models pull ORG/NAME`.")
    else:
        console().print(_table(found))
        print(f"In {cache_folder()}. Serve one with `vllm-mlx serve NAME`.")


@models_app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Its id on Hugging Face.", show_default=False)],
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="TEXT", show_default=False, help="Branch, tag or commit.")
    ] = None,
) -> None:
    """Fetch a checkpoint from Hugging Face. What is there already is not fetched again."""
    from ...runner.download import download, is_hub_id

    if not is_hub_id(model):
        raise WrongUsage(f"{model} is no name on Hugging Face: write ORG/NAME, such as mlx-community/Qwen3-8B-4bit.")
    folder = download(model, revision)
    facts = describe(folder)
    print(f"{model} lies in {folder}: {_summary(facts)}.\nServe it with `vllm-mlx serve {model}`.")


def _summary(facts: Description) -> str:
    context = f", {facts.context:,} tokens of context" if facts.context else ""
    return f"{facts.architecture}, {facts.kind}, {readable(facts.weights_bytes)} in {facts.precision}{context}"


def _table(found: list[CachedModel]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("Name", overflow="fold")
    table.add_column("Size", justify="right", no_wrap=True)
    for name in ("Kind", "Architecture", "Weights"):
        table.add_column(name)
    table.add_column("Context", justify="right", no_wrap=True)
    for name in ("Reasoning", "Tools"):
        table.add_column(name)
    for model in found:
        table.add_row(model.name, readable(model.disk_bytes), *_cells(model.description))
    return table


def _cells(facts: Description | None) -> tuple[str, ...]:
    if facts is None:
        return ("cannot be served",)
    kind = facts.kind if facts.has_template else f"{facts.kind}, no chat"
    context = f"{facts.context:,}" if facts.context else "?"
    return kind, facts.architecture, facts.precision, context, facts.reasoning or "–", facts.tools or "–"


def _fields(model: CachedModel) -> dict[str, Any]:
    facts = None if model.description is None else asdict(model.description)
    return {"name": model.name, "disk_bytes": model.disk_bytes, "folder": str(model.folder), "facts": facts} | (
        {"trouble": model.trouble} if model.trouble else {}
    )
