"""The watch of ranks: how the end, the silence and the standstill of a rank are noticed and reported."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from vllm_mlx.core.errors import ConfigError
from vllm_mlx.ranks import watch as module
from vllm_mlx.ranks.channel import Channel, Lost
from vllm_mlx.ranks.watch import Watch

HOST = "127.0.0.1"
WAIT_S = 20.0
Ends = SimpleQueue[Exception | None]


def pair() -> tuple[Channel, Channel]:
    with socket.create_server((HOST, 0)) as server:
        client = socket.create_connection(server.getsockname())
        return Channel(server.accept()[0]), Channel(client)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Rank 0's end and the worker's."""
    zero, one = pair()
    yield zero, one
    zero.close()
    one.close()


def watched(rank: int, *channels: Channel) -> tuple[Watch, Ends]:
    found: Ends = SimpleQueue()
    peers = range(1, len(channels) + 1) if rank == 0 else [0]
    return Watch(rank, dict(zip(peers, channels, strict=True)), found.put), found


def beat(begun: int, done: int) -> dict[str, object]:
    return {"beat": [begun, done]}


def test_messages_pass_and_heartbeats_do_not(ends: tuple[Channel, Channel]) -> None:
    watch, _ = watched(0, ends[0])
    ends[1].say(beat(3, 2))
    ends[1].say({"captures": [1]})
    [peer] = watch.peers
    assert peer.hear(WAIT_S) == {"captures": [1]}
    assert peer.plans == (3, 2)
    with pytest.raises(Lost, match=r"Rank 1 \(127\.0\.0\.1\) has not answered for 0\.05 s"):
        peer.hear(0.05)
    assert ends[1].hear(WAIT_S)["beat"] == [1, 0]


def test_the_end_of_a_worker_is_told_to_the_others(ends: tuple[Channel, Channel]) -> None:
    third, two = pair()
    watch, found = watched(0, ends[0], third)
    ends[1].close()
    error = found.get(timeout=WAIT_S)
    assert isinstance(error, Lost) and str(error) == "Rank 1 (127.0.0.1) is lost: it has closed the connection."
    while "stop" not in (message := two.hear(WAIT_S)):
        pass
    assert message == {"stop": str(error), "refuses": False}
    with pytest.raises(Lost, match=r"Rank 1 \(127\.0\.0\.1\) is lost"):
        watch.peers[0].hear(WAIT_S)
    two.close()
    assert found.empty()


class Slow(Channel):
    """Takes a while for its last message."""

    has_told = False

    def say(self, message: dict[str, object]) -> int:
        time.sleep(0.1 if "stop" in message else 0)
        num_bytes = super().say(message)
        self.has_told |= "stop" in message
        return num_bytes


def test_the_others_are_told_before_the_end_is_reported(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told of the end ends the process."""
    monkeypatch.setattr(module, "LEAVE_S", WAIT_S)
    with socket.create_server((HOST, 0)) as server:
        client = Channel(socket.create_connection(server.getsockname()))
        slow = Slow(server.accept()[0])
    found: SimpleQueue[bool] = SimpleQueue()
    Watch(0, {1: ends[0], 2: slow}, lambda _: found.put(slow.has_told))
    ends[1].close()
    assert found.get(timeout=WAIT_S)
    client.close()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (None, None, ""),
        (KeyboardInterrupt(), None, ""),
        (ConfigError("no memory."), ConfigError, "refuses to start"),
        (RuntimeError("a fault."), Lost, "has ended"),
    ],
)
def test_a_rank_says_why_it_leaves(
    ends: tuple[Channel, Channel], error: BaseException | None, kind: type[Exception] | None, words: str
) -> None:
    zero, _ = watched(0, ends[0])
    one, found = watched(1, ends[1])
    zero.leave(error)
    told = found.get(timeout=WAIT_S)
    if kind is None:
        assert told is None and one.peers[0].hear(WAIT_S)["stop"] is True
    else:
        assert isinstance(told, kind) and str(told) == f"Rank 0 (127.0.0.1) {words}: {error}"
        with pytest.raises(kind):
            one.peers[0].hear(WAIT_S)


def test_silence_is_a_loss_once_all_have_loaded(ends: tuple[Channel, Channel]) -> None:
    """Also if the other rank has said nothing since then."""
    watch, found = watched(0, ends[0])
    watch.ready()
    error = found.get(timeout=WAIT_S)
    assert isinstance(error, Lost)
    assert re.fullmatch(r"Rank 1 \(127\.0\.0\.1\) is lost: it has said nothing for [34]\.\d s\.", str(error))


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_without_progress_hangs_however_it_beats(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    monkeypatch.setattr(module, "STEP_S", 1.0)
    watch, found = watched(0, ends[0])
    watch.ready()
    theirs = beat(3, 2 if who else 3)
    ends[1].say(theirs)
    ends[1].say({"captures": []})
    watch.peers[0].hear(WAIT_S)  # so that the heartbeat has come, too
    watch.begin(3, 0)
    if who:
        watch.done()
    while found.empty():
        ends[1].say(theirs)
        time.sleep(0.05)
    error = found.get()
    assert isinstance(error, Lost)
    assert re.fullmatch(rf"Rank {who} has hung for [12] s after plan {2 if who else 0}\.", str(error))


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_load_without_progress_hangs_however_its_rank_beats(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    monkeypatch.setattr(module, "LOAD_S", 1.0)
    watch, found = watched(0, ends[0])
    num_parts = 0
    while found.empty():
        num_parts += 1
        if who and num_parts < 60:
            watch.advance()
        done = 0 if who else min(num_parts, 60)
        ends[1].say(beat(done + 1, done))
        time.sleep(0.05)
    assert num_parts > 60
    assert re.fullmatch(rf"Rank {who} has hung for [12] s after part 0 of its load\.", str(found.get()))


def test_a_step_of_many_tokens_may_take_longer(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_S", 0.5)
    monkeypatch.setattr(module, "STEP_TOKEN_S", 1.0)
    watch, found = watched(0, ends[0])
    one, _ = watched(1, ends[1])
    for each in (watch, one):
        each.ready()
        each.begin(1, 100)
    threading.Event().wait(1.0)
    assert found.empty()
    for each in (watch, one):
        each.done()


def test_a_heartbeat_carries_figures(ends: tuple[Channel, Channel]) -> None:
    report: Callable[[], dict[str, object]] = lambda: {"memory": [1, 2, 3]}  # noqa: E731
    one, _ = watched(1, ends[1])
    one.report = report
    while "memory" not in (row := ends[0].hear(WAIT_S)["row"]):
        pass
    assert row["memory"] == [1, 2, 3] and row["rank"] == 1
