"""`vllm-mlx doctor`: checks each thing that the server needs, and gives advice if it is missing."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.errors import ConfigError, VLLMMLXError
from ..core.memory import readable
from .models import AGENT_CONTEXT, cache_folder, default_budget, describe, fitting, local_folder, nearest
from .output import configure_logging
from .remote import Remote
from .settings import Settings, local_url
from .terminal import AsJson, ExitCode, console, option

if TYPE_CHECKING:
    from ..llm import LLM

Verdict = Literal["good", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: Verdict  # bad: the server cannot work; warning: it does not work as well as it could
    text: str


SETTINGS = frozenset({
    "model", "tensor_parallel_size", "worker_port", "worker_host", "secret_file", "rdma_devices", "text_only",
    "models_from",
})  # fmt: skip
_MARKS = {"good": ("✓", "green"), "warning": ("!", "yellow"), "bad": ("✗", "bold red")}


def doctor(
    settings: Settings,
    as_json: AsJson = False,
    quick: Annotated[bool, option("--quick", None, "Skip the self-test, which loads the demo.")] = False,
    workers: Annotated[bool, option("--workers", None, "Wait for the workers, and check the link to them.")] = False,
) -> None:
    """Check whether this machine can serve a model. The exit code is 1 if something prevents it."""
    configure_logging("error")
    checks = []
    screen = console()
    for check in _checks(settings, with_self_test=not quick, with_workers=workers):
        checks.append(check)
        if not as_json:
            screen.print(_line(check))
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    if any(check.verdict == "bad" for check in checks):
        raise typer.Exit(ExitCode.FAILED)


def _checks(settings: Settings, *, with_self_test: bool, with_workers: bool) -> Iterator[Check]:
    """Yield each check as soon as it is done. Checks that need MLX are skipped if MLX does not work."""
    yield check_python()
    if is_other_installed():
        yield Check("Package", "warning", "another vllm-mlx is installed beside this one: `pip uninstall vllm-mlx`")
    device = check_device()
    yield device
    if works := device.verdict != "bad":
        yield check_memory(settings)
        yield check_choice(settings)
    yield check_downloads()
    yield (accepts := check_settings(settings) if works else Check("Settings", "bad", "MLX has to work first"))
    if accepts.verdict != "bad":
        yield check_cache_folder(settings)
    yield check_port(settings)
    if accepts.verdict != "bad":
        yield from check_models(settings)
    if works and with_self_test:
        yield self_test()
    if accepts.verdict != "bad" and with_workers:
        yield from check_workers(settings)


def _line(check: Check) -> Table:
    mark, style = _MARKS[check.verdict]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(width=12)
    grid.add_column(overflow="fold")
    name, _, rest = check.name.partition(" ")
    grid.add_row(Text(mark, style), Text(name), Text(f"{rest}: {check.text}" if rest else check.text))
    return grid


_PORT_ANSWER_S = 3.0  # a program that holds a port may not answer
_LITTLE_DISK = 20_000_000_000  # bytes: a model of eight billion weights in four bits, twice


def check_python() -> Check:
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return Check("Python", "bad", f"{version}: this Python is for Intel; install one for Apple silicon")
    return Check("Python", "good", version)


def is_other_installed() -> bool:
    """Return whether the package index's `vllm-mlx`, which is another program, is installed in this environment."""
    try:
        return distribution("vllm-mlx").read_text("direct_url.json") is None  # a clone's installation has this file
    except PackageNotFoundError:
        return False


def check_device() -> Check:
    try:
        import mlx.core as mx

        is_metal = mx.metal.is_available()
        value = mx.sum(mx.ones((64, 64)) @ mx.ones((64, 64))).item()
    except (ImportError, OSError, RuntimeError) as error:
        return Check("MLX", "bad", f"it does not work: {error}")
    if value != 64**3:
        return Check("MLX", "bad", f"a product of two matrices is wrong: {value} instead of {64**3}")
    version = getattr(mx, "__version__", "?")
    if not is_metal and sys.platform == "darwin":
        return Check("MLX", "bad", f"{version} finds no Metal: is this a virtual machine, or macOS too old?")
    if "/Cellar/mlx/" in str(Path(mx.__file__).resolve()):
        text = f"{version} of Homebrew may lack kernels for an M5; `pip install mlx` in an environment has them"
        return Check("MLX", "warning", text)
    if is_metal:
        return Check("MLX", "good", f"{version}, Metal on {mx.device_info().get('device_name', 'this GPU')}")
    return Check("MLX", "warning", f"{version} on the CPU, for tests only: it is many times slower than Metal")


def check_memory(settings: Settings) -> Check:
    """Compare the memory that the server may take with the machine's."""
    from ..runner.device import device_memory

    device = device_memory()
    budget = settings.memory_budget or device.default_budget_bytes
    text = f"{readable(device.total_bytes)}, of which the server takes {readable(budget)} at most"
    limit = device.recommended_bytes
    if limit is not None:
        text += f"; Metal keeps up to {readable(limit)} wired{_wired_setting()}"
        if budget > limit:
            return Check("Memory", "warning", f"{text}: a larger budget is slow. Lower --memory-budget")
    if budget > device.total_bytes:
        return Check("Memory", "bad", f"{text}: that is more than the machine has. Lower --memory-budget")
    return Check("Memory", "good", text)


def check_choice(settings: Settings) -> Check:
    """Name the checkpoints that coding agents can use on this machine."""
    budget = default_budget(settings.memory_budget)
    found = [f"{one.name} ({readable(one.weights_bytes)})" for one in fitting(budget)]
    if not found:
        return Check("Choice", "warning", f"no checkpoint for coding agents fits {readable(budget)} with their context")
    return Check("Choice", "good", f"with {AGENT_CONTEXT:,} tokens of context fit, by computation: {', '.join(found)}")


def check_settings(settings: Settings) -> Check:
    from .serve import accepted

    try:
        accepted(settings)
    except ConfigError as error:
        return Check("Settings", "bad", error.message)
    return Check("Settings", "good", "`serve` accepts them")


def _wired_setting() -> str:
    """Describe macOS's limit of wired memory; the text is empty where there is none."""
    try:
        result = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True, timeout=5, check=True
        )
        megabytes = int(result.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return f" (iogpu.wired_limit_mb is {megabytes})" if megabytes else " (macOS's own limit)"


def check_downloads() -> Check:
    from ..disk.place import nearest

    folder = cache_folder()
    existing = nearest(folder)
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {readable(free)} free"
    if not os.access(existing, os.W_OK | os.X_OK):
        return Check("Downloads", "bad", f"{text}: it is not writable. Set HF_HOME to a folder that is")
    if free < _LITTLE_DISK:
        return Check("Downloads", "warning", f"{text}: that is little for a checkpoint. HF_HOME may name another disk")
    return Check("Downloads", "good", text)


_LITTLE_CACHE = 5_000_000_000  # bytes: some hundred thousand tokens of a small model


def check_cache_folder(settings: Settings) -> Check:
    """Check whether conversations can be kept on disk."""
    from ..disk.place import default_max_bytes, folder_of, free_bytes, held_bytes, prepare

    config = settings.engine_config()
    if not config.prefix_cache or config.cache_disk_bytes == 0:
        return Check("Cache", "good", "conversations are not kept on disk, because a setting turns this off")
    folder = folder_of(config.cache_dir)
    if (trouble := prepare(folder, is_trial=True)) is not None:
        return Check("Cache", "warning", f"{trouble}. Conversations are not kept on disk; --cache-dir names a folder")
    held, free = held_bytes(folder), free_bytes(folder)
    limit = config.cache_disk_bytes or default_max_bytes(folder)
    text = f"{folder}, {readable(held)} of at most {readable(limit)}, {readable(free)} free"
    if limit > held + free:
        return Check("Cache", "warning", f"{text}: the disk has less space than --cache-disk asks for")
    if limit < _LITTLE_CACHE:
        return Check(
            "Cache",
            "warning",
            f"{text}, which is little. Set --cache-disk, or name a folder on another disk with --cache-dir",
        )
    return Check("Cache", "good", text)


def check_port(settings: Settings) -> Check:
    """Check whether the port is free, or taken by a server that answers."""
    if settings.port == 0:
        return Check("Port", "good", "any free port, because it is set to 0")
    from ..server.run import listen

    try:
        listen(settings.host, settings.port).close()
    except ConfigError as error:
        url = local_url(settings.host, settings.port)
        key = next(iter(settings.api_keys), None)
        try:
            model = Remote(url, key, answer_s=_PORT_ANSWER_S).model().name
        except VLLMMLXError:
            return Check("Port", "bad", error.message.rstrip("."))
        return Check("Port", "good", f"a server is running already: {url} serves {model}")
    return Check("Port", "good", f"{settings.port} on {settings.host} is free")


_LITTLE_CONTEXT = 16_384  # tokens: below it, coding agents hardly work
_QUESTIONS = ("What is 2 + 3?", "Count to 9.")
_REPLY_TOKENS = 24


def check_models(settings: Settings) -> Iterator[Check]:
    """Check each model together with the pinned ones; for models in folders, print the memory that each would take."""
    from ..runner.checkpoint import checkpoints, folders_of

    for name, folder in checkpoints(folders_of(settings.models_from)):
        found = check_model(settings.model_copy(update={"model": str(folder)}))
        yield replace(found, name=f"Model {name}", verdict="warning" if found.verdict == "bad" else found.verdict)
    if settings.models_from and not settings.models and "model" not in settings.model_fields_set:
        return
    pinned = [_weights_of(local_folder(listed.model)) if listed.pin else 0 for listed in settings.models] or [0]
    for one, own_bytes in zip(settings.each(), pinned, strict=True):
        yield check_model(one, sum(pinned) - own_bytes)


def _weights_of(folder: Path | None) -> int:
    """Return 0 for a model that is not on this machine or cannot be served, which has its own line."""
    try:
        return 0 if folder is None else describe(folder).weights_bytes
    except ConfigError:
        return 0


def check_model(settings: Settings, held_bytes: int = 0) -> Check:
    """Check by the model's files whether it fits if others hold `held_bytes`. No weights are read."""
    name = f"Model {settings.model}"
    folder = local_folder(settings.model)
    if folder is None:
        from ..runner.checkpoint import check_name

        try:
            check_name(settings.model)
        except ConfigError as error:
            return Check(name, "bad", f"{error.message}{nearest(settings.model, settings.memory_budget)}".rstrip("."))
        return Check(name, "warning", f"not on this machine: fetch it with `vllm-mlx models pull {settings.model}`")
    verdict: Verdict = "good"
    text = ""
    try:
        for latest, fact in _facts_of(settings, folder, held_bytes):
            verdict, text = latest, text + fact
    except ConfigError as error:
        return Check(name, "bad", f"{text}. {error.message}".rstrip(".") if text else error.message)
    return Check(name, verdict, text)


def _facts_of(settings: Settings, folder: Path, held_bytes: int) -> Iterator[tuple[Verdict, str]]:
    """Yield the parts of a sentence about a model, each with the verdict so far. Raises ConfigError."""
    from ..engine.loading import checked_tokenizer
    from ..engine.sizing import budget_of, least_memory
    from ..prompt.reply_formats import reply_formats
    from ..ranks.shards import several_macs, shard_of
    from ..runner.checkpoint import find_checkpoint
    from ..runner.encoder import begin_loading_encoder
    from ..runner.encoder_checkpoint import read_encoder
    from ..runner.load_model import begin_loading

    facts, config = describe(folder), settings.engine_config()
    found = find_checkpoint(str(folder), trust_remote_code=config.trust_remote_code)
    reply_formats(config, checked_tokenizer(config, found))
    encoder = read_encoder(found, config)
    num_macs, trusts, text_only = config.tensor_parallel_size, config.trust_remote_code, config.text_only
    shard = None if num_macs == 1 else shard_of(found, num_macs, text_only=text_only, trust_remote_code=trusts)

    budget = default_budget(settings.memory_budget)
    yield "good", f"{facts.architecture}, {facts.kind}, {readable(facts.weights_bytes)} in {facts.precision}"
    if held_bytes:
        yield "good", f" beside {readable(held_bytes)} of pinned models"
    weights_bytes, bytes_per_token = facts.weights_bytes, facts.bytes_per_token
    if shard is not None:
        weights_bytes, bytes_per_token = shard.weights_bytes, shard.footprint.bytes_per_token
        yield "good", f", {readable(weights_bytes)} on each of {num_macs} Macs"
    if settings.join is not None:
        yield "good", ", of which this worker holds a part"
        return
    if held_bytes + weights_bytes >= budget:
        alone = not held_bytes and shard is None
        macs = several_macs(found, budget, trust_remote_code=trusts) if alone else ""
        advice = f"Choose a smaller or more quantised model.{macs}".rstrip(".")
        yield "bad", f": it does not fit {readable(budget)}. {advice}"
        return
    left = least_memory(config, found, budget_of(config, held_bytes), weights_bytes).rows_bytes
    yield "good", f"; {readable(left)} remain"
    if encoder is not None and not encoder.is_causal:
        begin_loading_encoder(found, encoder).check()
        yield "good", f" for texts of {encoder.max_tokens:,} tokens at most"
        return
    room = left // bytes_per_token if bytes_per_token else None
    yield "good", " for conversations" if room is None else f", about {room:,} tokens of conversations"
    if shard is None:
        begin_loading(found, trust_remote_code=trusts, text_only=text_only).check()
    if room is not None and room < (config.max_model_len or 0):
        yield "warning", f", and its `max_model_len` is {config.max_model_len:,}"
    elif room is not None and room < _LITTLE_CONTEXT:
        yield "warning", ", which is little for coding agents"


def check_workers(settings: Settings) -> Iterator[Check]:
    """Wait for the workers of a model on several Macs, check the link to them, and let them go."""
    from ..ranks.shards import MOST_RANKS
    from ..ranks.sums import check_link
    from .worker import leading

    config, name = settings.engine_config(), "Workers"
    try:
        with leading(settings, config, Console(stderr=True), only_checks=True) as lead:
            if lead is None:
                raise ConfigError(f"Say how many Macs with --tensor-parallel-size, from 2 to {MOST_RANKS}.")
            yield Check(name, "good", "all have joined, with the same versions and files of the checkpoint")
            name = "Link"
            link = check_link(lead.ranks, lead.checkpoint, config.max_prefill_chunk)
            for own, text in lead.facts():
                yield Check(own, "good", text)
            speed = f"{readable(link.bytes_per_s)} leave each Mac in a second"
            yield Check(
                "Sums", "good", f"right over the link, also those of {config.max_prefill_chunk:,} tokens; {speed}"
            )
    except (VLLMMLXError, RuntimeError) as error:
        yield Check(name, "bad", str(error).rstrip("."))


def self_test() -> Check:
    """Ask the demo twice. The second reply must have the same tokens and use the cache."""
    from .. import LLM

    started_s = time.monotonic()
    try:
        with LLM("demo", text_only=True) as llm:
            for question in _QUESTIONS:
                if trouble := _compare(llm, question):
                    return Check("Self-test", "bad", trouble)
    except VLLMMLXError as error:
        return Check("Self-test", "bad", error.message)
    took_s = time.monotonic() - started_s
    return Check("Self-test", "good", f"cold and cached replies are equal, token by token ({took_s:.1f} s)")


def _compare(llm: "LLM", question: str) -> str | None:
    """Ask a question twice. Returns the fault in the replies, or None."""
    messages = [{"role": "user", "content": question}]
    cold, warm = (
        llm.chat(messages, temperature=0, max_tokens=_REPLY_TOKENS, logprobs=True)[0].outputs[0] for _ in range(2)
    )
    ids = [[token.token_id for token in reply.logprobs or ()] for reply in (cold, warm)]
    if not ids[0] or ids[0] != ids[1] or cold.reasoning != warm.reasoning:
        return f"the reply to {question!r} is {warm.text!r} from the cache and {cold.text!r} without it"
    if warm.usage is None or not warm.usage.cached_tokens:
        return f"the cache held no part of {question!r} the second time"
    return None
