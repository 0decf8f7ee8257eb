"""`vllm-mlx models`: lists the checkpoints on this machine, fetches and removes one, and has a server load one.

recommended.toml has the checkpoints that `doctor` recommends.
"""

import difflib
import json
import re
import shutil
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Column, Table
from rich.text import Text

from ..core.errors import ConfigError
from ..core.memory import readable
from ..formats import detect_formats
from ..runner.model_types import text_config
from .completion import downloaded
from .options import server_settings
from .remote import KeyOption, NoServer, UrlOption, find_server, served_names
from .terminal import TABLE, AsJson, CommandFailed, WrongUsage, confirm, console, number_columns, option


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    architecture: str
    kind: str  # text, vision
    weights_bytes: int
    precision: str
    context: int | None  # tokens; None if the checkpoint does not say
    bytes_per_token: int  # attention state if every layer keeps it: an upper bound
    reasoning: str | None
    tools: str | None
    has_template: bool


def describe(folder: Path) -> Description:
    """Describe a checkpoint by its files. Raises ConfigError for a folder that cannot be served."""
    from ..formats.tokenizer import read_json
    from ..runner.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(str(folder), trust_remote_code=True)
    settings = read_json(folder / "tokenizer_config.json")
    config, text, template = checkpoint.config, text_config(checkpoint.config), _template(folder, settings)
    reasoning, tools = detect_formats(template, _added_tokens(settings))
    return Description(
        architecture=checkpoint.architecture,
        kind="vision" if config.get("vision_config") else "text",
        weights_bytes=checkpoint.file_bytes,
        precision=_precision(config, text),
        context=checkpoint.max_model_len,
        bytes_per_token=_bytes_per_token(text),
        reasoning=reasoning,
        tools=tools,
        has_template=template is not None,
    )


def _precision(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    if bits := quantization.get("bits"):
        return f"{bits} bits"
    dtypes = [source.get(key) for source in (config, text) for key in ("dtype", "torch_dtype")]
    return str(next((dtype for dtype in dtypes if dtype), "?"))


def _bytes_per_token(text: Mapping[str, Any]) -> int:
    """Compute the size of keys and values in 16 bits, in all layers that attend."""
    num_layers, num_heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    if not isinstance(num_layers, int) or not isinstance(num_heads, int) or not num_heads:
        return 0
    if kinds := text.get("layer_types"):
        num_layers = sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // num_heads
    return int(2 * 2 * num_layers * (text.get("num_key_value_heads") or num_heads) * head_dim)


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _added_tokens(settings: Mapping[str, Any]) -> set[str]:
    """Return the added tokens, by which formats are recognised. To read the complete vocabulary takes a second."""
    added = settings.get("added_tokens_decoder") or {}
    return {str(token.get("content")) for token in added.values() if isinstance(token, dict)}


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    disk_bytes: int
    folder: Path
    facts: Description | None  # None if the checkpoint cannot be served
    trouble: str = ""  # why it cannot be served


def cache_folder() -> Path:
    from ..runner.checkpoint import HUB, folders_of

    return folders_of([HUB])[-1]


def cached_models() -> list[CachedModel]:
    """List the checkpoints in Hugging Face's cache and in LM Studio's folders, by name."""
    from ..runner.checkpoint import HUB, checkpoints, folders_of

    return [_cached(name, folder) for name, folder in checkpoints(folders_of([HUB]))]


def local_folder(model: str) -> Path | None:
    """Return the folder of a model that is on this machine. Returns None if it must be downloaded."""
    from ..runner.checkpoint import folder_of

    return folder_of(model) or next((cached.folder for cached in cached_models() if cached.name == model), None)


def nearest(model: str, memory_budget: int | None = None) -> str:
    """Return a sentence, after a space, with names like a missing model's that fit the memory and the size it names."""
    if local_folder(model) is not None:
        return ""
    here = {cached.name: cached.facts.weights_bytes for cached in cached_models() if cached.facts is not None}
    budget = default_budget(memory_budget)
    fit = [name for name, weights_bytes in here.items() if weights_bytes < budget]
    fit += [one.name for one in recommended() if one.needed_bytes(budget) <= budget]
    wanted = _billions(model)
    fit = [name for name in fit if not wanted or wanted / _RATIO <= _billions(name) <= wanted * _RATIO]
    names = {_stem(name): name for name in fit}
    near = difflib.get_close_matches(_stem(model), names, n=_NUM_SHOWN, cutoff=_SIMILAR)
    near.sort(key=lambda stem: names[stem] not in here)
    told = [names[stem] + (" (on this machine)" if names[stem] in here else "") for stem in near]
    return f" Similar names: {', '.join(told)}." if told else " `vllm-mlx doctor` names models that fit this machine."


def default_budget(memory_budget: int | None) -> int:
    """Return the memory that a server may take: the setting's value, or else the machine's default."""
    from ..runner.device import device_memory

    return memory_budget or device_memory().default_budget_bytes


def _stem(name: str) -> str:
    """Return a model's own name in lower case, without its publisher and its precision."""
    return _PRECISION.sub("", name.rpartition("/")[2].lower().replace(":", "-"))


def _billions(name: str) -> float:
    """Return the number of weights that a name gives, such as 8B; 0 if it gives none."""
    found = _WEIGHTS.search(name)
    return float(found[1]) * _UNITS[found[2].lower()] if found else 0.0


def _cached(name: str, folder: Path) -> CachedModel:
    revisions = folder.parent if folder.parent.name == "snapshots" else folder
    stats = [file.stat() for file in revisions.rglob("*") if file.is_file()]
    disk_bytes = sum({stat.st_ino: stat.st_size for stat in stats}.values())  # revisions share files
    try:
        return CachedModel(name, disk_bytes, folder, describe(folder))
    except ConfigError as error:
        return CachedModel(name, disk_bytes, folder, None, error.message)


EXAMPLE = "mlx-community/Qwen3.5-9B-MLX-4bit"  # of help texts and messages: a model for a Mac with 16 GB
AGENT_CONTEXT = 40_000  # tokens that coding agents need for real work
_WEIGHTS = re.compile(r"(?<![a-z\d.])(\d+(?:\.\d+)?)([mbt])(?![a-z\d])", re.IGNORECASE)  # such as 8B
_UNITS = {"m": 1e-3, "b": 1.0, "t": 1e3}
_PRECISION = re.compile(r"[-_](mlx|gguf|latest|instruct|it|\d+-?bit|mxfp\d|bf16|fp16|q\d).*")
_RATIO = 1.5  # of sizes that are about the same
_SIMILAR = 0.6  # of two names, by difflib
_SHARE = 16  # 1/16 of the budget for a chunk's attention scores and for images; see `Budget` in core/memory.py
_COPIED_BYTES = 256 << 20  # bytes copied in one evaluation
_NUM_SHOWN = 3
_ANSWER_S = 2.0  # a server that does not answer in time keeps no model from being listed or removed
_LOAD_S = 600.0  # the longest wait for weights that are loaded or leave


@dataclass(frozen=True, slots=True)
class Recommended:
    """A checkpoint that coding agents work with, as recommended.toml lists it."""

    name: str
    weights_bytes: int
    bytes_per_token: int

    def needed_bytes(self, budget_bytes: int) -> int:
        """Return the part of the budget that one conversation of `AGENT_CONTEXT` tokens needs, weights included."""
        overhead = budget_bytes // _SHARE + _COPIED_BYTES
        return self.weights_bytes + AGENT_CONTEXT * self.bytes_per_token + overhead


def recommended() -> list[Recommended]:
    """Return all recommended checkpoints, by size."""
    text = Path(__file__).with_name("recommended.toml").read_text(encoding="utf-8")
    return [Recommended(**row) for row in tomllib.loads(text)["checkpoints"]]


def fitting(budget_bytes: int) -> list[Recommended]:
    """Return the largest checkpoints that fit with a conversation of `AGENT_CONTEXT` tokens, the largest first."""
    return [one for one in reversed(recommended()) if one.needed_bytes(budget_bytes) <= budget_bytes][:_NUM_SHOWN]


models_app = typer.Typer(
    help="List the checkpoints on this machine, fetch or remove one, or have a server load or unload one.",
    invoke_without_command=True,
)


@models_app.callback()
def models(
    context: typer.Context,
    as_json: AsJson = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    found, served = cached_models(), _served()
    if as_json:
        states = {card.get("root"): {"state": card.get("state")} for card in served}
        print(json.dumps([_fields(model) | states.get(model.name, {}) for model in found], indent=2))
    elif not found:
        best = next(iter(fitting(default_budget(server_settings().memory_budget))), None)
        name = "ORG/NAME" if best is None else best.name
        print(f"There is no checkpoint in {cache_folder()}.\nFetch one with `vllm-mlx models pull {name}`.")
    else:
        console().print(_table(found))
        print("Serve one with `vllm-mlx serve NAME`. --json says in which folder each is.")
    told: set[str] = set()
    if served and not as_json:
        print("A server serves:")
    for card in () if as_json else served:
        if card["id"] not in told:  # an alias of a card before has no own line
            print(_line(card))
        told.update(card.get("aliases") or ())


def _line(card: Mapping[str, Any]) -> str:
    aliases = ", ".join(card.get("aliases") or ())
    facts = [str(card.get("state")), *(["pinned"] if card.get("pinned") else []), str(card.get("task", "chat"))]
    size = f", {readable(card['load_bytes'])} of weights" if card.get("load_bytes") else ""
    texts, tokens = card.get("total_encoded_inputs"), card.get("total_encoded_tokens")
    read = f"; {texts:,} texts with {tokens:,} tokens read" if texts else ""
    return f"  {card['id']}{f' ({aliases})' if aliases else ''}: {', '.join(facts)}{size}{read}."


def _served() -> list[dict[str, Any]]:
    """Return the models of the server with the settings of this machine and their counts; none if no server runs."""
    with suppress(CommandFailed, ConfigError):
        server = find_server(None, None, as_admin=True, answer_s=_ANSWER_S)
        counts = {row.get("name"): row for row in server.status().get("models") or ()}
        return [{**counts.get(card.get("id"), {}), **card} for card in server.entries("/v1/models")]
    return []


NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="Any name by which requests ask for it. Default: the first model.",
        autocompletion=served_names,
    ),
]


@models_app.command()
def load(name: NameArgument = None, url: UrlOption = None, api_key: KeyOption = None) -> None:
    """Have a running server load the weights of a model, and wait until they are in memory."""
    _have_server("load", name, url, api_key)


@models_app.command()
def unload(name: NameArgument = None, url: UrlOption = None, api_key: KeyOption = None) -> None:
    """Have a running server free the memory of a model's weights. The next request loads them again."""
    _have_server("unload", name, url, api_key)


def _have_server(act: str, name: str | None, url: str | None, api_key: str | None) -> None:
    server = find_server(url, api_key, as_admin=True, answer_s=_LOAD_S)
    card = server.ask(f"/v1/models/{quote(name or server.model().name)}/{act}?wait=true", "POST")
    print(f"{card.get('id')} is {card.get('state')}.")


@models_app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Name on Hugging Face.", show_default=False)],
    revision: Annotated[str | None, option("--revision", "TEXT", "Branch, tag or commit.")] = None,
) -> None:
    """Fetch a checkpoint from Hugging Face. Files that are present are not fetched again."""
    from ..runner.checkpoint import download, is_hub_id

    if not is_hub_id(model):
        raise WrongUsage(f"{model} is not a name on Hugging Face: write ORG/NAME, such as {EXAMPLE}.")
    folder = download(model, revision)
    facts = describe(folder)
    print(f"{model} is in {folder}: {_summary(facts)}.\nServe it with `vllm-mlx serve {model}`.")


def _summary(facts: Description) -> str:
    context = f", {facts.context:,} tokens of context" if facts.context else ""
    return f"{facts.architecture}, {facts.kind}, {readable(facts.weights_bytes)} in {facts.precision}{context}"


@models_app.command(name="rm")
def remove(
    model: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name, as `models` lists it.", show_default=False, autocompletion=downloaded
        ),
    ],
    yes: Annotated[bool, option("--yes", None, "Remove it without a question.")] = False,
) -> None:
    """Remove a checkpoint from this machine, and say what this frees. A model that is being served stays."""
    found = next((cached for cached in cached_models() if cached.name == model), None)
    if found is None:
        raise CommandFailed(f"{model} is not a downloaded model. `vllm-mlx models` lists them.")
    with suppress(NoServer, ConfigError):
        server = find_server(None, None, as_admin=True, answer_s=_ANSWER_S)
        if any(local_folder(served.checkpoint) == found.folder for served in server.models()):
            raise CommandFailed(f"The server at {server.url} uses {model}. Stop it first.")
    files = found.folder.parents[1] if found.folder.parent.name == "snapshots" else found.folder
    size = readable(found.disk_bytes)
    confirm(f"{files} will be removed, which frees {size}.", is_sure=yes)
    try:
        shutil.rmtree(files)
    except OSError as error:
        raise CommandFailed(f"{error.filename}: {error.strerror}.") from error
    print(f"{model} is removed, {size} freed.")


def _table(found: list[CachedModel]) -> Table:
    size, context = number_columns("Size", "Context")
    table = Table(Column("Name", overflow="fold"), size, "Kind", "Weights", context, **TABLE)
    for model in found:
        facts = model.facts
        if facts is None:
            table.add_row(Text(f"{model.name}\n  cannot be served; --json says why"), readable(model.disk_bytes))
            continue
        formats = [f"{what} {name}" for what, name in (("reasoning", facts.reasoning), ("tools", facts.tools)) if name]
        kind = facts.kind if facts.has_template else f"{facts.kind}, no chat"
        context_text = f"{facts.context:,}" if facts.context else "?"
        name = Text(f"{model.name}\n  {', '.join([facts.architecture, *formats])}")
        table.add_row(name, readable(model.disk_bytes), kind, facts.precision, context_text)
    return table


def _fields(model: CachedModel) -> dict[str, Any]:
    fields = asdict(model) | {"folder": str(model.folder)}
    return {name: value for name, value in fields.items() if name != "trouble" or value}
