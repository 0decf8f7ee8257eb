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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import __version__
from ..core.errors import ConfigError, first_line, setting
from ..core.tasks import settle
from ..runner.checkpoint import Checkpoint
from .channel import Channel, Door, Lost, Message, Silent, join
from .lockstep import Ranks
from .watch import Ended, Watch

logger = logging.getLogger(__name__)
PORTS = range(20_000, 32_000)  # of the data channel; systems hand out higher ones to any connection
_ANSWER_S = 10.0  # for an answer that needs no work
_CHECK_S = 120.0  # for a rank's checks before weights are read
_LOOK_S = 0.5
_NUM_PARTS, _PART = 16, 4096  # of a file of weights: so many of so many bytes are compared
_LOSS_S = 5.0  # after which the loss of a worker has been noticed
_SOFTWARE = ("protocol", "vllm-mlx", "mlx", "mlx-lm", "Python")  # facts, in the order of comparison
_FILES = ("config.json", "weights")
Facts = Mapping[str, str]
Tell = Callable[[str], None]
Check = Callable[[int, Message], object]  # it gets the number of ranks and what rank 0 told; it raises ConfigError


@dataclass(frozen=True, slots=True)
class Joined:
    """The ranks of a model, once all are there."""

    ranks: Ranks
    watch: Watch
    told: Message  # what rank 0 told all others


def facts_of(checkpoint: Checkpoint) -> dict[str, str]:
    """What must be the same on all ranks."""
    files = sorted(checkpoint.path.glob("model*.safetensors"))
    return {
        "protocol": "1",
        "vllm-mlx": __version__,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "config.json": _digest((checkpoint.path / "config.json").read_bytes()),
        "weights": _digest(b"".join(_sample(file) for file in files)),
        "system": f"{platform.machine()}, {platform.mac_ver()[0] or platform.release()}",
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
) -> Joined:
    """Wait for the workers and start with them, as rank 0. `tell` gets what is awaited, `ended` is the watch's.

    `devices` are those of MLX_IBV_DEVICES; without them, tensors travel over TCP. Raises ConfigError, and Lost.
    """
    guests: list[Channel] = []
    try:
        try:
            check(size, told)
            _check_rdma(devices)
        except ConfigError as error:
            raise ConfigError(f"Rank 0 refuses to start: {error.message}") from error
        hosts = [_address(door.host), *_gather(door, size - 1, own, guests, tell)]
        link = {"hosts": hosts, "devices": devices, "coordinator": _address(door.host)}
        for rank, guest in enumerate(guests, 1):
            guest.name = f"Rank {rank} ({guest.peer})"
            guest.say({"rank": rank, "size": size, "told": told, "link": link})
        for rank, guest in enumerate(guests, 1):
            _check_refusal(_checked(guest, guests), f"rank {rank} ({guest.peer})")
    except ConfigError as error:
        with suppress(TimeoutError):
            while True:
                guests.append(door.accept(0.0))
        for guest in guests:
            with suppress(Lost):
                guest.say({"refused": error.message})
        raise
    for guest in guests:
        guest.say({"go": True})
    threading.Thread(target=_turn_away, args=(door,), daemon=True).start()

    def close(error: Exception | None) -> None:
        door.close()  # a worker that comes back waits for the next server
        ended(error)

    return _connected(0, size, told, link, Watch(0, dict(enumerate(guests, 1)), close))


def _gather(door: Door, num: int, own: Facts, guests: list[Channel], tell: Tell) -> list[str]:
    """Wait for `num` guests. Returns their addresses for data. Raises ConfigError if one differs or refuses."""
    hosts: dict[Channel, str] = {}
    told = -1
    while True:
        guests[:] = [guest for guest in guests if _waits(guest)]
        if told != len(guests):
            told = len(guests)
            tell(f"{told} of {num} workers joined")
        for guest in guests:
            with suppress(Lost):
                guest.say({"joined": told, "of": num})
        if told == num:
            return [hosts[guest] for guest in guests]
        with suppress(TimeoutError, Lost):
            guest = door.accept(_LOOK_S)
            hello = guest.hear(_ANSWER_S)
            guests.append(guest)
            name = f"rank {len(guests)} ({guest.peer})"
            _check_refusal(hello, name)
            _compare(own, hello.get("facts", {}), name)
            hosts[guest] = hello["host"]


def _checked(guest: Channel, guests: list[Channel]) -> Message:
    """Wait for what a rank's checks found. All ranks are told meanwhile that rank 0 is there. Raises Lost."""
    for _ in range(int(_CHECK_S / _LOOK_S)):
        with suppress(Silent):
            return guest.hear(_LOOK_S)
        for each in guests:
            with suppress(Lost):  # it is met when this guest is heard
                each.say({"waits": True})
    raise Lost(f"{guest.name} is lost: its checks have taken more than {_CHECK_S:.0f} s.")


def _waits(guest: Channel) -> bool:
    """Whether a guest is still there. It has nothing to say."""
    try:
        guest.hear(0.0)
    except Silent:
        return True
    except Lost:
        logger.warning("The worker at %s has left again", guest.peer)
    return False


def _compare(own: Facts, other: Facts, name: str) -> None:
    for fact in _SOFTWARE + _FILES:
        if own[fact] != other.get(fact):
            differs = f"{fact} is {other.get(fact)} there and {own[fact]} here"
            advice = "the same files of the checkpoint" if fact in _FILES else "the same versions of everything"
            raise ConfigError(f"Rank 0 refuses {name}: {differs}. Install {advice} on all Macs.")
    if own["system"] != other.get("system"):
        logger.warning("The system of %s is %s, and here it is %s", name, other.get("system"), own["system"])


def _turn_away(door: Door) -> None:
    while True:
        guest = door.accept()
        time.sleep(_LOSS_S)  # if it comes back before its loss is noticed, the connection ends meanwhile
        with suppress(Lost):
            guest.say({"refused": "Rank 0 has all its workers already. Stop one of them, or start another server."})


def follow(
    address: tuple[str, int], secret: bytes, own: Callable[[], Facts], *, check: Check, tell: Tell, ended: Ended
) -> Joined:
    """Join rank 0 and start with it, as a worker, however long that takes. `own` may raise ConfigError, as `check` may.

    Raises ConfigError if any rank refuses, and Lost once all ranks were there.
    """
    try:
        facts = own()
    except ConfigError as error:
        with suppress(Lost):
            channel = join(*address, secret, 0.0)
            channel.say({"refused": error.message})
            _check_refusal(channel.hear(_ANSWER_S))
        raise
    channel, welcome = _joined(address, secret, facts, tell)
    rank, size, told, link = (welcome[name] for name in ("rank", "size", "told", "link"))
    try:
        check(size, told)
        _check_rdma(link["devices"])
        channel.say({"ready": True})
    except ConfigError as error:
        channel.say({"refused": error.message})
    while "waits" in (answer := channel.hear(_ANSWER_S)):
        pass
    _check_refusal(answer)
    return _connected(rank, size, told, link, Watch(rank, {0: channel}, ended))


def _joined(address: tuple[str, int], secret: bytes, facts: Facts, tell: Tell) -> tuple[Channel, Message]:
    """Join, again and again, until all ranks are there. Returns rank 0's welcome too. Raises ConfigError."""
    while True:
        channel = join(*address, secret, tell=tell)
        channel.name, told = f"The server at {channel.peer}", None
        try:
            channel.say({"facts": dict(facts), "host": _address(channel.host)})
            while "rank" not in (message := channel.hear(_ANSWER_S)):
                _check_refusal(message)
                if told != (told := f"{message['joined']} of {message['of']} workers joined"):
                    tell(told)
            return channel, message
        except Lost as error:
            tell(f"{error} Joining again.")
            time.sleep(_LOOK_S)


def _check_refusal(message: Message, name: str = "") -> None:
    """Raise ConfigError if a message refuses. `name` is the rank that sent it, unless rank 0 has named one."""
    if "refused" in message:
        raise ConfigError(f"R{name[1:]} refuses to start: {message['refused']}" if name else str(message["refused"]))


def _check_rdma(devices: list[Any] | None) -> None:
    if devices is not None and not mx.distributed.is_available("jaccl"):
        advice = f"turn it on in Recovery with `rdma_ctl enable`, or leave out {setting('rdma_devices')} on the server"
        raise ConfigError(f"This machine has no RDMA, which needs macOS 26.2: {advice}.")


def _address(host: str) -> str:
    """Find a free port for data on an address of this machine."""
    for port in random.sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.create_server((host, port)):
            return f"{host}:{port}"
    raise ConfigError(f"No port from {PORTS[0]} to {PORTS[-1]} is free on {host}.")


def _connected(rank: int, size: int, told: Message, link: Message, watch: Watch) -> Joined:
    """Connect the data channel. The thread that calls this stays free for signals. Raises Lost."""
    found: Future[mx.distributed.Group] = Future()
    threading.Thread(target=settle, args=(found, lambda: _init(rank, link)), daemon=True).start()
    try:
        group = found.result()
        if group.size() != size:
            raise RuntimeError(f"{group.size()} ranks instead of {size}")
    except (RuntimeError, ValueError, OSError) as error:
        lost = Lost(f"Rank {rank} could not connect the data channel: {first_line(error)}.")
        watch.leave(lost)
        raise lost from error
    return Joined(Ranks(group, watch.peers, watch), watch, told)


def _init(rank: int, link: Message) -> mx.distributed.Group:
    for name in [name for name in os.environ if name.removeprefix("MLX_").startswith(("JACCL", "IBV_", "HOSTFILE"))]:
        del os.environ[name]  # they would change what a backend does, some of them without a word
    is_ring = link["devices"] is None
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([[host] for host in link["hosts"]] if is_ring else link["devices"], file)
        file.flush()
        os.environ["MLX_RANK"] = str(rank)
        os.environ["MLX_HOSTFILE" if is_ring else "MLX_IBV_DEVICES"] = file.name
        if not is_ring:
            os.environ["MLX_JACCL_COORDINATOR"] = link["coordinator"]
        return mx.distributed.init(strict=True, backend="ring" if is_ring else "jaccl")
