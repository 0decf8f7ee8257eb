"""The control channel: who is let in, what is read, and how the end of a peer is noticed."""

import json
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError
from pathlib import Path

import pytest

from tests.support.running import eventually
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.ranks.channel import MAX_BYTES, Channel, Door, Lost, join, read_secret

SECRET = b"a secret of the tests"
HOST = "127.0.0.1"
WAIT_S = 20.0


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door(HOST, 0, SECRET)
    yield door
    door.close()


@pytest.fixture
def ends(door: Door) -> Iterator[tuple[Channel, Channel]]:
    """The door's end and the end that joined."""
    joined = join(HOST, door.port, SECRET, WAIT_S)
    accepted = door.accept(WAIT_S)
    yield accepted, joined
    accepted.close()
    joined.close()


def bare() -> tuple[Channel, socket.socket]:
    """A channel and the bare socket at its other end, which may say anything."""
    with socket.create_server((HOST, 0)) as server:
        client = socket.create_connection(server.getsockname())
        return Channel(server.accept()[0]), client


def test_messages_cross_in_both_directions_and_keep_their_order(ends: tuple[Channel, Channel]) -> None:
    accepted, joined = ends
    for number in range(3):
        size = accepted.say({"number": number, "text": "é"})
        assert size == len(json.dumps({"number": number, "text": "é"}, separators=(",", ":")))
    assert [joined.hear(WAIT_S)["number"] for _ in range(3)] == [0, 1, 2]
    joined.say({})
    assert accepted.hear(WAIT_S) == {}
    assert (accepted.host, accepted.peer) == (HOST, HOST)


def test_several_threads_may_say_long_messages(ends: tuple[Channel, Channel]) -> None:
    accepted, joined = ends
    threads = [threading.Thread(target=accepted.say, args=({"ids": [at] * 100_000},)) for at in range(4)]
    for thread in threads:
        thread.start()
    heard = sorted(joined.hear(WAIT_S)["ids"][0] for _ in threads)
    assert heard == [0, 1, 2, 3]


def test_silence_and_the_end_of_a_peer_are_a_loss(ends: tuple[Channel, Channel]) -> None:
    accepted, joined = ends
    with pytest.raises(Lost, match=r"127\.0\.0\.1 is lost: it has said nothing for 0\.05 s"):
        accepted.hear(0.05)
    joined.close()
    with pytest.raises(Lost, match="it has closed the connection"):
        accepted.hear(WAIT_S)
    with pytest.raises(Lost):
        for _ in range(100):  # the first message after the end may still be taken by the system
            accepted.say({"text": "x" * 10_000})


def test_closing_wakes_the_thread_that_hears(ends: tuple[Channel, Channel]) -> None:
    accepted, _ = ends
    lost = threading.Event()

    def hear() -> None:
        try:
            accepted.hear()
        except Lost:
            lost.set()

    threading.Thread(target=hear, daemon=True).start()
    accepted.close()
    assert lost.wait(WAIT_S)


@pytest.mark.parametrize(
    "data",
    [b"{", b"\xff\xfe", b"[" * 100_000, b'"text"', b"[1]", b"", pickle.dumps({"number": 1})],
    ids=["cut", "bytes", "deep", "text", "list", "empty", "pickle"],
)
def test_what_is_no_message_ends_the_connection(data: bytes) -> None:
    channel, peer = bare()
    peer.sendall(struct.pack("!i", len(data)) + data)
    with pytest.raises(Lost, match="what it has sent is not a message"):
        channel.hear(WAIT_S)


class Proxy:
    """Between a door and the peer that joins through it: it hands on their proofs of the secret, and then anything."""

    def __init__(self, door: Door):
        with socket.create_server((HOST, 0)) as server:
            joined: list[Channel] = []
            address = server.getsockname()[1]
            thread = threading.Thread(target=lambda: joined.append(join(HOST, address, SECRET, WAIT_S)), daemon=True)
            thread.start()
            self.worker = server.accept()[0]
        self.leader = socket.create_connection((HOST, door.port), WAIT_S)
        for source in (self.leader, self.worker, self.leader, self.worker, self.leader, self.worker):
            other = self.worker if source is self.leader else self.leader
            other.sendall(frame(source))
        thread.join(WAIT_S)
        self.ends = {"door": door.accept(WAIT_S), "joined": joined[0]}
        self.sockets = {"door": self.leader, "joined": self.worker}

    def taken(self, end: str, *numbers: int) -> list[bytes]:
        """The frames of messages that an end says, which do not reach the other."""
        for number in numbers:
            self.ends[end].say({"number": number})
        return [frame(self.sockets[end]) for _ in numbers]


def frame(source: socket.socket) -> bytes:
    source.settimeout(WAIT_S)
    head = source.recv(4, socket.MSG_WAITALL)
    return head + source.recv(struct.unpack("!i", head)[0], socket.MSG_WAITALL)


_OTHER = {"door": "joined", "joined": "door"}
_FORGED = {
    "bare": lambda proxy, end, door: [framed(json.dumps({"stop": True, "refuses": True}).encode())],
    "tagged": lambda proxy, end, door: [framed(bytes(32) + b"{}")],
    "changed": lambda proxy, end, door: [proxy.taken(end, 1)[0].replace(b"1", b"2")],
    "replayed": lambda proxy, end, door: proxy.taken(end, 0) * 2,
    "swapped": lambda proxy, end, door: proxy.taken(end, 0, 1)[::-1],
    "left out": lambda proxy, end, door: [(frames := proxy.taken(end, 0, 1, 2))[0], frames[2]],
    "reflected": lambda proxy, end, door: proxy.taken(_OTHER[end], 1),
    "of another connection": lambda proxy, end, door: Proxy(door).taken(end, 1),
}


def framed(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


@pytest.mark.parametrize("end", _OTHER)
@pytest.mark.parametrize("kind", _FORGED)
def test_a_proxy_that_hands_on_the_proofs_can_change_nothing(door: Door, kind: str, end: str) -> None:
    """`end` seems to say what it has not said, or not now. The other end hears what was said, in order, or nothing."""
    proxy = Proxy(door)
    proxy.sockets[_OTHER[end]].sendall(b"".join(_FORGED[kind](proxy, end, door)))
    heard = []
    with pytest.raises(Lost, match="is not a message of this version of vllm-mlx, or was changed on its way"):
        while True:
            heard.append(proxy.ends[_OTHER[end]].hear(WAIT_S))
    assert heard == ([{"number": 0}] if kind in ("replayed", "left out") else [])


class Touch:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_no_pickle_is_read(tmp_path: Path) -> None:
    channel, peer = bare()
    data = pickle.dumps(Touch(tmp_path / "made"))
    peer.sendall(struct.pack("!i", len(data)) + data)
    with pytest.raises(Lost):
        channel.hear(WAIT_S)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("header", [struct.pack("!i", MAX_BYTES + 1), struct.pack("!iQ", -1, 1 << 62)])
def test_a_huge_message_is_refused_by_its_length(header: bytes) -> None:
    channel, peer = bare()
    peer.sendall(header)
    with pytest.raises(Lost, match="bad message length"):
        channel.hear(WAIT_S)


def test_a_wrong_secret_is_told_on_both_sides(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="has another secret"):
        join(HOST, door.port, SECRET + b"!", WAIT_S)
    warning = "The worker at 127.0.0.1 has another secret and was refused. Copy the file of --secret-file to it"
    eventually(lambda: warning in caplog.text)
    with pytest.raises(TimeoutError):
        door.accept(0.0)


def test_a_door_that_knows_another_secret_is_not_believed() -> None:
    """The peer says that our answer is right, without knowing the secret, and then cannot answer our question."""
    with socket.create_server((HOST, 0)) as server:

        def impostor() -> None:
            channel = Channel(server.accept()[0])
            with pytest.raises((AuthenticationError, EOFError)):
                channel.prove(b"another secret of the tests", first=True)

        threading.Thread(target=impostor, daemon=True).start()
        with pytest.raises(ConfigError, match="has another secret"):
            join(HOST, server.getsockname()[1], SECRET, WAIT_S)


def test_strangers_who_say_nothing_block_nobody(door: Door) -> None:
    strangers = [socket.create_connection((HOST, door.port)) for _ in range(8)]
    joined = join(HOST, door.port, SECRET, WAIT_S)
    door.accept(WAIT_S).say({"text": "welcome"})
    assert joined.hear(WAIT_S) == {"text": "welcome"}
    for stranger in strangers:
        stranger.close()


def test_too_many_strangers_are_disconnected_and_their_time_is_bounded(door: Door) -> None:
    strangers = [socket.create_connection((HOST, door.port)) for _ in range(40)]
    joined = join(HOST, door.port, SECRET, WAIT_S)  # it tries again until places are free
    assert door.accept(WAIT_S).peer == joined.host
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", struct.pack("!i", 4) + b"\0\0\0\0", b"\0"])
def test_a_stranger_who_says_anything_is_disconnected(door: Door, data: bytes) -> None:
    with socket.create_connection((HOST, door.port), timeout=WAIT_S) as stranger:
        stranger.sendall(data)
        with suppress(OSError):  # it may be disconnected already
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass
    with pytest.raises(TimeoutError):
        door.accept(0.05)


def test_a_worker_may_start_first_and_says_what_it_waits_for() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    told: list[str] = []
    joined: list[Channel] = []
    thread = threading.Thread(target=lambda: joined.append(join(HOST, port, SECRET, WAIT_S, told.append)))
    thread.start()
    while not told:
        time.sleep(0.01)
    door = Door(HOST, port, SECRET)
    assert door.accept(WAIT_S).peer == HOST
    thread.join(WAIT_S)
    assert joined
    assert told == [f"{HOST}:{port} does not answer, or has all its workers (Connection refused)."]
    door.close()


def test_without_a_server_a_limit_ends_the_wait() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(Lost, match="does not answer"):
        join(HOST, port, SECRET, 0.0)


def test_a_door_says_why_it_cannot_open(door: Door) -> None:
    with pytest.raises(
        ConfigError, match=rf"Workers cannot join at 127\.0\.0\.1:{door.port} \(.* in use\): .*--worker-port a free"
    ):
        Door(HOST, door.port, SECRET)
    for host in ("192.0.2.1", "0.0.0.0", "::1"):
        with pytest.raises(ConfigError, match=rf"Workers cannot join at {host}:0 \(.*: --worker-host is an IPv4 addr"):
            Door(host, 0, SECRET)


def test_a_closed_door_lets_another_open() -> None:
    first = Door(HOST, 0, SECRET)
    first.close()
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return Door(HOST, first.port, SECRET).close()
        except ConfigError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def test_a_secret_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match=r"Cannot read the secret.*No such file.*openssl rand"):
        read_secret(path)
    path.write_text("0123456789abcdef\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"Other users may open .* 640.*chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == b"0123456789abcdef"
    path.write_text("short")
    with pytest.raises(ConfigError, match="has 5 characters, of 16 at least"):
        read_secret(path)
    with pytest.raises(ConfigError, match="Cannot read the secret"):
        read_secret(tmp_path)
