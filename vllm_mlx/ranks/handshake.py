"""Brings the ranks of a model together, in any order of their starts: rank 0 compares facts and hands out places.

A rank that cannot take part refuses: all ranks then end with its reason, before weights are read.
"""

import hashlib
import json
import logging
import os
import platform
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import __version__
from ..core.errors import ConfigError, first_line, setting
from ..runner.checkpoint import Checkpoint
from ..runner.weight_files import model_files
from ..util.faults import RanksParted
from ..util.tasks import settle
from .channel import RETRY_S, Channel, Door, Lost, Message, join
from .lockstep import Ranks
from .shards import Shard
from .watch import SILENCE_S, Ended, Watch

logger = logging.getLogger(__name__)
PORTS = range(20_000, 32_000)  # of the data channel; systems hand out higher ones to any connection
_ANSWER_S = 10.0  # for an answer that needs no work
_CONNECT_S = 60.0  # for the data channel, once all ranks are ready
TELL_S = 10.0  # how long a worker that refuses looks for rank 0
_TRIES_S = 4 * RETRY_S  # two tries of a worker to join, with their proofs
_LOOK_S = 0.5
_NUM_PARTS, _PART = 16, 4096  # parts of a file of weights that are compared, and their bytes
_FILES = ("config.json", "weights")
Facts = Mapping[str, str]
Tell = Callable[[str], None]
Check = Callable[[int, Message], Shard]  # it gets the number of ranks and rank 0's message; it raises ConfigError


def facts_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the facts that must be the same on all ranks."""
    files = model_files(checkpoint.path)
    return {
        "protocol": "4",
        "vllm-mlx": __version__,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "config.json": _digest((checkpoint.path / "config.json").read_bytes()),
        "weights": _digest(b"".join(_sample(file) for file in files)),
    }


def _sample(file: Path) -> bytes:
    """Return the name, the size and some parts of a file of weights. To compare all of it would take too long."""
    size = file.stat().st_size
    data = f"{file.name} {size}\n".encode()
    with file.open("rb") as stream:
        for place in range(_NUM_PARTS):
            stream.seek(size * place // _NUM_PARTS)
            data += stream.read(_PART)
    return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def lead(
    door: Door,
    size: int,
    own: Facts,
    *,
    told: Message,
    devices: list[Any] | None,
    check: Check,
    tell: Tell,
    ended: Ended,
) -> Ranks:
    """Wait for the workers and start with them, as rank 0. `tell` gets the awaited ranks, `ended` is the watch's.

    `devices` are those of MLX_IBV_DEVICES; without them, tensors travel over TCP. Raises ConfigError, and Lost.
    """
    guests: dict[Channel, str] = {}  # and their addresses for data
    try:
        shard = _checked("Rank 0", check, size, told, devices)
        _gather(door, size - 1, own, guests, tell)
    except ConfigError as error:
        refuse(door, size - 1, error, guests)
        raise
    door.close()  # a worker that comes now waits for the next server
    link = {"hosts": [_address(door.host), *guests.values()], "devices": devices, "coordinator": _address(door.host)}
    for rank, guest in enumerate(guests, 1):
        guest.say({"rank": rank, "size": size, "told": told, "link": link})
    ranks = Ranks(Watch(0, dict(enumerate(guests, 1)), ended), size, told)
    _connect(ranks, link, lambda: shard)
    return ranks


def refuse(door: Door, num: int, error: ConfigError, guests: Iterable[Channel] = ()) -> None:
    """Tell `num` workers why rank 0 does not start: `guests`, and those that join within their next two tries."""
    told, deadline_s = list(guests), time.monotonic() + _TRIES_S
    with suppress(TimeoutError):
        while len(told) < num:
            told.append(door.accept(max(0.0, deadline_s - time.monotonic())))
    for guest in told:
        with suppress(Lost):
            guest.say({"refused": error.message})


def _gather(door: Door, num: int, own: Facts, guests: dict[Channel, str], tell: Tell) -> None:
    """Wait until `num` guests are there. Raises ConfigError if one differs or refuses."""
    told = ""
    while True:
        if told != (told := f"{len(guests)} of {num} workers joined"):
            tell(told)
        for guest in list(guests):
            try:
                guest.say({"joined": told})
                guest.hear(SILENCE_S)
            except Lost:
                logger.warning("The worker at %s has left again", guest.peer)
                guests.pop(guest)
                guest.close()
        if len(guests) == num:
            return
        try:
            guest = door.accept(_LOOK_S)
            hello = guest.hear(_ANSWER_S)
        except Lost as error:
            logger.warning("A worker has not joined: %s", error)
        except TimeoutError:
            pass
        else:
            guests[guest] = hello.get("host", "")
            name = f"Rank {len(guests)} ({guest.peer})"
            if "refused" in hello:
                raise ConfigError(f"{name} refuses to start: {hello['refused']}")
            _compare(own, hello.get("facts", {}), name.lower())


def _compare(own: Facts, other: Facts, name: str) -> None:
    for fact in own:
        if own[fact] != other.get(fact):
            differs = f"{fact} is {other.get(fact)} there and {own[fact]} here"
            advice = "the same files of the checkpoint" if fact in _FILES else "the same versions of everything"
            raise ConfigError(f"Rank 0 refuses {name}: {differs}. Install {advice} on all Macs.")


def follow(
    address: tuple[str, int], secret: bytes, own: Callable[[], Facts], *, check: Check, tell: Tell, ended: Ended
) -> Ranks:
    """Join rank 0 and start with it, as a worker, however long that takes. `own` may raise ConfigError, as `check` may.

    Raises ConfigError if any rank refuses, and Lost once all ranks were there.
    """
    try:
        facts = own()
    except ConfigError as error:
        with suppress(Lost):
            join(*address, secret, TELL_S).say({"refused": error.message})
        raise
    channel, place = _joined(address, secret, facts, tell)
    rank, size, told, link = (place[name] for name in ("rank", "size", "told", "link"))
    ranks = Ranks(Watch(rank, {0: channel}, ended), size, told)
    _connect(ranks, link, lambda: _checked(f"Rank {rank} ({channel.host})", check, size, told, link["devices"]))
    return ranks


def _joined(address: tuple[str, int], secret: bytes, facts: Facts, tell: Tell) -> tuple[Channel, Message]:
    """Join, again and again, until all ranks are there. Also returns rank 0's answer. Raises ConfigError."""
    while True:
        channel = join(*address, secret, tell=tell)
        channel.name, told = f"The server at {channel.peer}", None
        try:
            channel.say({"facts": dict(facts), "host": _address(channel.host)})
            while "rank" not in (message := channel.hear(_ANSWER_S)):
                if "refused" in message:
                    raise ConfigError(message["refused"])
                if told != (told := message["joined"]):
                    tell(told)
                channel.say({"here": True})
            return channel, message
        except Lost as error:
            tell(f"{error} Joining again.")
            time.sleep(_LOOK_S)


def _checked(name: str, check: Check, size: int, told: Message, devices: list[Any] | None) -> Shard:
    """Check the needs of this rank. Raises ConfigError, which names the rank."""
    try:
        if devices is not None and not mx.distributed.is_available("jaccl"):
            advice = f"turn it on in Recovery with `rdma_ctl enable`, or serve without {setting('rdma_devices')}"
            raise ConfigError(f"This machine has no RDMA, which needs macOS 26.2: {advice}.")
        return check(size, told)
    except ConfigError as error:
        raise ConfigError(f"{name} refuses to start: {error.message}") from error


def _address(host: str) -> str:
    """Find a free port for data on an address of this machine."""
    for port in random.sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.create_server((host, port)):
            return f"{host}:{port}"
    raise ConfigError(f"No port from {PORTS[0]} to {PORTS[-1]} is free on {host}.")


def _connect(ranks: Ranks, link: Message, check: Callable[[], Shard]) -> None:
    """Wait until all ranks have checked their model, and connect the data channel. Raises ConfigError, and Lost."""
    found: Future[mx.distributed.Group] = Future()
    try:
        ranks.shard = check()
        ranks.exchange("ready", True)
        try:  # the thread that calls this stays free for signals
            threading.Thread(target=settle, args=(found, lambda: _init(ranks.rank, link)), daemon=True).start()
            ranks.group = found.result(_CONNECT_S)
        except (RuntimeError, ValueError, OSError) as error:
            raise Lost(f"Rank {ranks.rank} could not connect the data channel: {first_line(error)}.") from error
    except BaseException as error:
        if type(error) is not RanksParted:  # the watch learns at the same time why rank 0 has not answered as expected
            ranks.watch.leave(error)
        raise


def _init(rank: int, link: Message) -> mx.distributed.Group:
    for name in [name for name in os.environ if name.removeprefix("MLX_").startswith(("JACCL", "IBV_", "HOSTFILE"))]:
        del os.environ[name]  # they would change a backend's behaviour, some of them silently
    is_ring = link["devices"] is None
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([[host] for host in link["hosts"]] if is_ring else link["devices"], file)
        file.flush()
        os.environ["MLX_RANK"] = str(rank)
        os.environ["MLX_HOSTFILE" if is_ring else "MLX_IBV_DEVICES"] = file.name
        if not is_ring:
            os.environ["MLX_JACCL_COORDINATOR"] = link["coordinator"]
        return mx.distributed.init(strict=True, backend="ring" if is_ring else "jaccl")
