"""`vllm-mlx serve`: load the model, print its facts and a request to paste, and serve until a signal."""

import errno
import json
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..cache.stats import DiskReport
from ..core.config import DEFAULT_MAX_PIXELS, EngineConfig, ModelInfo
from ..core.errors import ConfigError, EngineDead, ModelLoadError, VLLMMLXError
from ..core.memory import readable
from ..core.stage import LoadStage
from ..server.config import ServerConfig
from ..util.faults import device_fault
from .models import nearest
from .options import unknown_variables
from .output import LogFile, Output, configure_logging, descriptor_of
from .settings import Settings, is_local, local_url
from .terminal import BrokeDown, CommandFailed, console
from .values import LOOKUPS
from .worker import check_leading, leading

logger = logging.getLogger(__name__)
# Errors of the system that other programs cause, or a disk that answers again.
_PASSING = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EBUSY,
            errno.ETIMEDOUT)  # fmt: skip


def run_server(settings: Settings, log: LogFile | None = None) -> None:
    """Serve until a signal; `log` is the file of the log, if stderr is one.

    Raises ConfigError before anything is served, and BrokeDown after any other error that a new start may not meet.
    """
    is_ready = Event()
    try:
        with ExitStack() as stack:
            _serve(settings, log, stack, is_ready)
    except EngineDead as error:
        raise BrokeDown(error.message) from error
    except ModelLoadError as error:
        similar = [nearest(one.model, settings.memory_budget) for one in settings.each()]
        raise ModelLoadError(error.message + "".join(similar)) from error
    except (VLLMMLXError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        logger.error("The server failed", exc_info=error)
        kind = BrokeDown if is_ready.is_set() or _may_pass(error) else CommandFailed
        raise kind(f"The server ended with an internal error: {type(error).__name__}: {error}") from error


def _may_pass(error: BaseException) -> bool:
    """Return whether another start, with the same files and settings, may not meet the error again."""
    return isinstance(error, MemoryError) or getattr(error, "errno", 0) in _PASSING or device_fault(error) is not None


def _serve(settings: Settings, log: LogFile | None, stack: ExitStack, is_ready: Event) -> None:
    handler = configure_logging(settings.log_level, log)
    for line in unknown_variables():
        logger.warning("%s", line)
    engine_config, config = accepted(settings)

    from ..server.recorder import open_recorder
    from ..server.run import answering_before, listen, run

    sock = listen(settings.host, settings.port)
    recorder = open_recorder(config)
    screen, stage = console(), LoadStage()
    with answering_before(sock, stage), handler.showing(stage):
        lead = stack.enter_context(leading(settings, engine_config, screen))

        from ..engine.found_models import FoundModels
        from ..engine.loading import open_disk, start_engine
        from ..server.app import create_app

        started_s = time.monotonic()
        disk = open_disk(engine_config)
        engine = start_engine(engine_config, disk, config.models, None if lead is None else lead.ranks, stage)
        found = FoundModels(engine, config.models, engine_config, disk) if config.models.places else None
    if lead is not None:
        lead.engine = engine
    entries, fronts = config.models.entries, engine.fronts
    url, count = local_url(settings.host, sock.getsockname()[1]), len(config.models.names)
    ready = f"\nvllm-mlx {__version__} is ready. A request loads the one that it names, of {count} models.\n\n"
    banner: Banner | str = f"{ready}Try it:\n\ncurl {url}/v1/models\n\nCtrl-C stops the server.\n"
    if fronts:
        banner = Banner(
            info=fronts[0].info,
            loaded=engine.model_facts,
            text_only=engine_config.text_only,
            max_pixels=engine_config.max_pixels,
            budget_bytes=fronts[0].facts.memory.total_bytes,
            disk=None if disk is None else disk.report,
            load_s=time.monotonic() - started_s,
            names=entries[0].names,
            beside=[(entry.names, front.info) for entry, front in zip(entries[1:], fronts[1:], strict=True)],
            api_keys=settings.api_keys,
            url=url,
            host=settings.host,
            install=install_command(sys.argv[0]),
            macs=[] if lead is None else lead.facts(),
        )
    app = create_app(engine, config, engine.memories.responses, recorder, found)
    is_ready.set()
    run(app, engine, sock, drain_s=settings.drain_s, started=lambda: show(banner, screen))


def accepted(settings: Settings) -> tuple[EngineConfig, ServerConfig]:
    """Make the settings of engine and server. Raises ConfigError for one that is refused with every checkpoint."""
    from ..engine.loading import check_settings

    server, engine = settings.server_config(), settings.engine_config()
    has_keys = not all(key.is_admin for key in server.api_keys)
    refuse_open_door(settings.host, has_keys=has_keys, insecure=settings.insecure)
    check_settings(engine)
    check_leading(settings, engine.tensor_parallel_size)
    for name in [name for name in LOOKUPS if name in (settings.speculative_config or "")]:
        logger.warning("`%s` of --speculative-config has no effect: the lengths of n-grams are fixed", name)
    return engine, server


def refuse_open_door(host: str, *, has_keys: bool, insecure: bool) -> None:
    """Raise ConfigError if the network could use the server without a key."""
    if not (is_local(host) or has_keys or insecure):
        raise ConfigError(
            f"--host {host} makes the server reachable from other machines: require a key with --api-key or "
            "--api-key-file, or set --insecure to accept requests without a key."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Banner:
    """The block that the terminal prints once the server is ready."""

    info: ModelInfo
    loaded: Mapping[str, Any]  # facts of the model, as /v1/status shows them
    text_only: bool
    max_pixels: int | None  # the setting; None for the default, which is lower if the vision encoder is slow
    budget_bytes: int
    disk: DiskReport | None  # None if a setting turns the cache on disk off
    load_s: float
    names: tuple[str, ...]
    api_keys: tuple[str, ...]
    url: str  # without a path
    host: str  # the address that the server listens on
    beside: Sequence[tuple[tuple[str, ...], ModelInfo]] = ()  # the names of each further model, and its facts
    macs: Sequence[tuple[str, str]] = ()  # lines about several Macs that run the model
    install: str | None = None  # the command that puts `vllm-mlx` on the PATH; None if it is there

    def print_to(self, console: Console) -> None:
        console.print(f"\n[bold]vllm-mlx {__version__}[/bold] is ready, {self.load_s:.1f} s after loading began\n")
        facts = Table.grid(padding=(0, 2))
        facts.add_column()
        facts.add_column(overflow="fold")  # a long path is shown whole
        for name, fact in self.facts():
            facts.add_row(Text(f"  {name}", "dim"), Text(fact))
        console.print(facts)
        # No wrapping: a line break inside a word would spoil pasted text.
        request = self.curl(show_key=console.is_terminal)
        console.print(f"\nTry it:\n\n{request}\n\nCtrl-C stops the server.\n", markup=False, soft_wrap=True)

    def facts(self) -> list[tuple[str, str]]:
        """Return the lines below the headline: a name and a text each."""
        info = self.info
        rows = [
            ("Model", ", ".join(self.names)),
            ("Architecture", f"{info.architecture}, {readable(info.weights_bytes)} of weights{self._taken()}"),
            ("Layers", layers(self.loaded)),
            ("Formats", formats(self.loaded)),
            *self._rewritten(),
            ("Context", f"{info.max_model_len:,} tokens"),
            *self._scaled_down(),
            *(("Beside", _in_short(names, other)) for names, other in self.beside),
            ("Memory", f"at most {readable(self.budget_bytes)}, {self._weights()}"),
            *self.macs,
            *self._on_disk(),
            ("URL", f"{self.url}/v1" + ("" if is_local(self.host) else f", open to the network on {self.host}")),
            ("Page", f"{self.url}/ in a browser: status and a chat"),
            *([("Install", f"{self.install} puts `vllm-mlx` on your PATH for good")] if self.install else []),
        ]
        if info.model not in self.names:
            rows.insert(1, ("From", info.model))
        whose = f"for {self.names[0]}, " if self.beside else ""
        return [*rows, *(("Off", f"{whose}{what}") for what in self.missing())]

    def _weights(self) -> str:
        if not self.beside:
            return "weights included"
        total = self.info.weights_bytes + sum(other.weights_bytes for _, other in self.beside)
        if total > self.budget_bytes:
            return f"so not all models fit at once: their weights take {readable(total)}"
        return f"of which the weights of all models take {readable(total)}"

    def _rewritten(self) -> list[tuple[str, str]]:
        needs = ", ".join(self.loaded["template_needs"])
        return [("Template", f"conversations are rewritten for it: {needs}")] if needs else []

    def _scaled_down(self) -> list[tuple[str, str]]:
        pixels = self.loaded["max_pixels"]
        if pixels is None or pixels >= (self.max_pixels or DEFAULT_MAX_PIXELS):
            return []
        size = f"scaled down to {pixels / 1e6:.2g} megapixels, which the vision encoder reads within 3 s"
        return [("Images", f"{size}; --max-pixels sets another size")]

    def _on_disk(self) -> list[tuple[str, str]]:
        if self.disk is None or self.disk.off_reason is not None:
            return []
        size = f"up to {readable(self.disk.max_bytes)}"
        return [("On disk", f"conversations are kept in {self.disk.folder}, {size}; --cache-disk 0 turns this off")]

    def _taken(self) -> str:
        if not self.info.takes_images:
            return ""
        return ", takes images" if self.loaded["no_videos"] else ", takes images and videos"

    def missing(self) -> list[str]:
        """Name each feature that is off, and why."""
        wanted = "--text-only is set" if self.text_only else "the checkpoint has no vision encoder"
        reason = self.loaded["no_shared_forward"]
        switched_off = "--no-prefix-cache or --repeatable is set"
        why_no_disk = "--cache-disk 0 is set" if self.disk is None else self.disk.off_reason
        checks = [
            (self.loaded["takes_chats"], "chats: the checkpoint has no chat template; --chat-template gives it one"),
            (self.info.takes_images, f"images and videos: {wanted}"),
            (not self.info.takes_images or not self.loaded["no_videos"], f"videos: {self.loaded['no_videos']}"),
            (not reason, f"one forward pass for rows of all lengths: {reason}"),
            (not self.loaded["no_drafts"], f"drafts of the next tokens: {self.loaded['no_drafts']}"),
            (not self.loaded["no_head"], f"drafts by an MTP head: {self.loaded['no_head']}"),
            (self.loaded["prefix_cache"], f"prefix cache: {self.loaded['no_prefix_cache'] or switched_off}"),
            (not self.loaded["prefix_cache"] or why_no_disk is None, f"prefix cache on disk: {why_no_disk}"),
            (
                self.loaded["reasoning_parser"],
                "reasoning in its own field: the chat template shows no known format of reasoning",
            ),
            (self.loaded["tool_call_parser"], "tool calls: the chat template shows no known format of tool calls"),
        ]
        return [text for is_on, text in checks if not is_on]

    def curl(self, *, show_key: bool) -> str:
        """Return a shell command to try. Without `show_key`, a variable replaces the key, because logs are kept."""
        body: dict[str, Any] = {"model": self.names[0], "messages": [{"role": "user", "content": "Who are you?"}]}
        path = "chat/completions"
        if not self.loaded["takes_chats"]:
            body, path = {"model": self.names[0], "prompt": "Once upon a time", "max_tokens": 30}, "completions"
        lines = [f"curl {self.url}/v1/{path}", "-H 'Content-Type: application/json'"]
        if self.api_keys:
            header = shlex.quote(f"Authorization: Bearer {self.api_keys[0]}")
            lines.append(f"-H {header}" if show_key else '-H "Authorization: Bearer $API_KEY"')
        lines.append(f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}")
        return " \\\n  ".join(lines)


def _in_short(names: Sequence[str], info: ModelInfo) -> str:
    size = f"{readable(info.weights_bytes)} of weights"
    return f"{', '.join(names)}: {info.architecture}, {size}, {info.max_model_len:,} tokens of context"


def install_command(program: str) -> str | None:
    """Return the command that puts `vllm-mlx` on the PATH, if `program` lies in a clone and the PATH lacks it."""
    script = Path(__file__).resolve().parents[2] / "scripts/install"
    in_clone = script.exists() and Path(program).absolute().is_relative_to(script.parents[1])
    return shlex.quote(str(script)) if in_clone and shutil.which("vllm-mlx") is None else None


def layers(loaded: Mapping[str, Any]) -> str:
    """Describe the kinds of state of the model, and the point where a known prompt resumes."""
    windows = [f"windows of {window:,}" for window in loaded["sliding_windows"]]
    others = [f"{name} copied whole" for name in loaded["copied_whole"]]
    attention = "recurrent state beside attention" if loaded["keeps_recurrent_state"] else "attention"
    kinds = ", ".join([attention, *windows, *others])
    if loaded["no_prefix_cache"]:
        return f"{kinds}: computes every prompt from its first token"
    if loaded["keeps_recurrent_state"] or others:
        return f"{kinds}: resumes at snapshots"
    return f"{kinds}: resumes where its window is kept" if windows else f"{kinds}: resumes at any token"


def formats(loaded: Mapping[str, Any]) -> str:
    return f"reasoning {loaded['reasoning_parser'] or 'none'}, tool calls {loaded['tool_call_parser'] or 'none'}"


def show(banner: Banner | str, screen: Console) -> None:
    """Print the banner. The event loop calls this, so it must not wait for a terminal that has been stopped."""
    with screen.capture() as captured:
        screen.print(banner, markup=False) if isinstance(banner, str) else banner.print_to(screen)
    Output(descriptor_of(sys.stdout)).write(captured.get())
