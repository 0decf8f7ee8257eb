"""`vllm-mlx worker`: one of the other Macs of a model that `serve` runs on several; and rank 0's part of it."""

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..core.config import EngineConfig
from ..core.errors import ConfigError, EngineDead, setting
from ..util.faults import Fault, RanksParted, device_fault
from ..util.tasks import settle
from .ending import end
from .output import LogFile, configure_logging, write_last
from .settings import Settings
from .terminal import BrokeDown, ExitCode, console

if TYPE_CHECKING:  # no model code before the settings are accepted
    from ..engine.client import EngineClient
    from ..ranks.lockstep import Ranks

logger = logging.getLogger(__name__)
SETTINGS = frozenset({
    "model", "join", "secret_file", "revision", "trust_remote_code", "memory_budget", "wired", "log_level",
})  # fmt: skip
_LEADING = ("worker_port", "worker_host", "secret_file", "rdma_devices")
_TOLD = (  # settings of rank 0 by which all ranks load alike
    "tensor_parallel_size", "text_only", "max_model_len", "max_num_seqs", "max_stall_ms", "max_prefill_chunk",
    "prefix_cache", "repeatable", "snapshot_every",
)  # fmt: skip
_ONLY_CHECKS = "only_checks"
_LAST_S = 2.0  # clients can read why their replies end during this time
_VERDICT_S = 5.0  # until the watch knows which rank is lost


def check_leading(settings: Settings, num_ranks: int) -> None:
    """Raise ConfigError if `serve` expects workers without a way to reach them, or has such a way without workers."""
    size = setting("tensor_parallel_size")
    if settings.join is not None:
        raise ConfigError(f"{setting('join')} is for `vllm-mlx worker`. Leave it out to serve.")
    if num_ranks == 1:
        for name in _LEADING:
            if name in settings.model_fields_set:
                raise ConfigError(f"{setting(name)} has no effect without workers. Set {size}, or leave it out.")
    elif len(settings.models) > 1:
        raise ConfigError(f"{size} is for one model, and {len(settings.models)} are listed. Serve one of them.")
    else:
        _secret(settings, f"{size} {num_ranks}", "worker_port")
        _devices(settings, num_ranks)


def check_working(settings: Settings) -> None:
    """Raise ConfigError if the settings of a worker do not say how to reach the server."""
    if settings.models:
        raise ConfigError("A worker has one MODEL, which is the server's.")
    _secret(settings, "A worker", "join")
    _address(settings)


def _secret(settings: Settings, what: str, name: str) -> bytes:
    from ..ranks.channel import read_secret

    for needed in (name, "secret_file"):
        if getattr(settings, needed) is None:
            raise ConfigError(f"{what} needs {setting(needed)}.")
    assert settings.secret_file is not None
    return read_secret(settings.secret_file)


def _address(settings: Settings) -> tuple[str, int]:
    host, _, port = (settings.join or "").rpartition(":")
    if not host or not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(
            f"{setting('join')} {settings.join} must be HOST:PORT, the server's {setting('worker_port')}."
        )
    return host, int(port)


def _devices(settings: Settings, num_ranks: int) -> list[Any] | None:
    if (path := settings.rdma_devices) is None:
        return None
    try:
        devices = json.loads(path.expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting('rdma_devices')} {path} cannot be read as JSON: {error}.") from error
    if not isinstance(devices, list) or len(devices) != num_ranks:
        raise ConfigError(f"{setting('rdma_devices')} {path} must list the devices of each of {num_ranks} Macs.")
    return devices


@contextmanager
def leading(
    settings: Settings, config: EngineConfig, screen: Console, *, only_checks: bool = False
) -> Iterator["Leading | None"]:
    """Wait until the workers have joined, as rank 0, and tell them at the end of the block why it ends.

    Without workers, do nothing. With `only_checks`, workers check the link and load no model. Raises ConfigError, and
    BrokeDown.
    """
    if config.tensor_parallel_size == 1:
        yield None
        return
    _on_signals(lambda number: sys.exit(ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.DONE))
    try:
        found = Leading(settings, config, screen, only_checks=only_checks)
        try:
            yield found
        except BaseException as error:
            if device_fault(error) is Fault.PARTED:
                time.sleep(_VERDICT_S)  # the watch ends the process as soon as it knows which rank is lost
            found.ranks.watch.leave(error)
            raise
        found.ranks.watch.leave()
    except RuntimeError as error:
        if device_fault(error) is Fault.PARTED:
            raise BrokeDown(str(error)) from error
        raise


class Leading:
    """Rank 0 of several ranks, and the end of its requests when another rank is lost."""

    engine: "EngineClient | None" = None  # once it is loaded

    def __init__(self, settings: Settings, config: EngineConfig, screen: Console, *, only_checks: bool):
        from ..ranks.channel import Door
        from ..ranks.handshake import facts_of, lead, refuse
        from ..ranks.shards import shard_of
        from ..runner.checkpoint import find_checkpoint

        size, trusts = config.tensor_parallel_size, config.trust_remote_code
        secret = _secret(settings, setting("tensor_parallel_size"), "worker_port")
        door = Door(settings.worker_host, settings.worker_port or 0, secret)
        tell = partial(screen.print, markup=False, soft_wrap=True)
        tell(f"On each other Mac: vllm-mlx worker {settings.model} --join {door.host}:{door.port} --secret-file FILE")
        try:
            self.checkpoint = find_checkpoint(config.model, config.revision, trust_remote_code=trusts)
            facts = facts_of(self.checkpoint)
        except ConfigError as error:
            refuse(door, size - 1, error)
            raise
        self.ranks: Ranks = lead(
            door,
            size,
            facts,
            told={name: getattr(config, name) for name in _TOLD} | {_ONLY_CHECKS: only_checks},
            devices=_devices(settings, size),
            check=lambda size, _: shard_of(self.checkpoint, size, text_only=config.text_only, trust_remote_code=trusts),
            tell=tell,
            ended=self._ended,
        )

    def facts(self) -> list[tuple[str, str]]:
        """Return the lines of the start-up block: the shard of each Mac, and the cost of the measured link."""
        shard, link = self.ranks.shard, self.ranks.link
        return [("Macs", f"experimental: {shard.comparison}"), ("Link", link.text(shard.num_sums))]

    def _ended(self, error: Exception | None) -> None:
        """End the process from the watch's thread: the engine thread may never come back from a collective."""
        reason = str(error or "A worker has stopped.")
        is_refusal = isinstance(error, ConfigError)
        if self.engine is not None:
            self.engine.fail(EngineDead(reason))
        if self.engine is not None or is_refusal:  # the main thread may end the process sooner, and in the same way
            time.sleep(_LAST_S)
        write_last(reason)
        end(ExitCode.FAILED if is_refusal else ExitCode.RESTART)


def worker(settings: Settings) -> None:
    """Run a part of MODEL for the server at --join, which runs on another Mac, until that server stops."""
    run_worker(settings)


def run_worker(settings: Settings, log: LogFile | None = None) -> None:
    """Join the server and work until it stops. Raises ConfigError, and BrokeDown once all ranks were there."""
    configure_logging(settings.log_level, log)
    check_working(settings)
    found = _Working(settings)
    _on_signals(found.stop)
    found.wait()
    logger.info("The server has stopped.")


def _on_signals(stop: Callable[[int], object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: stop(number))


class _Working:
    """A worker, on a separate thread: the main thread stays free for signals while native code runs."""

    ranks: "Ranks | None" = None

    def __init__(self, settings: Settings):
        self._settings = settings
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()  # why it ends, by the watch and by the thread
        done: Future[None] = Future()
        done.add_done_callback(lambda done: self._ends.put(done.exception()))
        threading.Thread(target=settle, args=(done, self._work), name="worker", daemon=True).start()

    def wait(self) -> None:
        """Wait until the server stops. Tell the other ranks of any other end, and raise ConfigError or BrokeDown."""
        from ..ranks.channel import Lost

        error = self._ends.get()
        if device_fault(error) is not None and not isinstance(error, Lost):
            with suppress(Empty):
                error = self._ends.get(timeout=_VERDICT_S)
        if error is None:
            return
        if self.ranks is not None:
            self.ranks.watch.leave(error)
        if isinstance(error, ConfigError):
            raise error
        if not isinstance(error, RanksParted):
            logger.error("The worker failed", exc_info=error)
        raise BrokeDown(str(error)) from error

    def stop(self, number: int) -> None:
        """End the process after a signal."""
        if self.ranks is not None:
            self.ranks.watch.leave(EngineDead(f"it was stopped by {signal.Signals(number).name}."))
        end(0 if self.ranks is not None or number != signal.SIGINT else ExitCode.INTERRUPTED)

    def _work(self) -> None:
        from ..engine.loading import work
        from ..ranks.handshake import facts_of, follow
        from ..ranks.shards import shard_of
        from ..ranks.sums import check_link
        from ..runner.checkpoint import find_checkpoint

        settings, config = self._settings, self._settings.engine_config()
        trusts = config.trust_remote_code
        find = cache(partial(find_checkpoint, config.model, config.revision, trust_remote_code=trusts))
        self.ranks = follow(
            _address(settings),
            _secret(settings, "A worker", "join"),
            lambda: facts_of(find()),
            check=lambda size, told: shard_of(find(), size, text_only=told["text_only"], trust_remote_code=trusts),
            tell=partial(console().print, markup=False, soft_wrap=True),
            ended=self._ends.put,
        )
        told = dict(self.ranks.told)
        if told.pop(_ONLY_CHECKS):
            check_link(self.ranks, find(), told["max_prefill_chunk"])
            self.ranks.peers[0].hear()  # until rank 0, which still prints, says that it stops
        else:
            work(replace(config, **told), find(), self.ranks)
