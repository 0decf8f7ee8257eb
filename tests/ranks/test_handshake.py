"""How ranks find each other and what makes them refuse, on both sides. No weights are read."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console

from tests.support.two_ranks import free_ports
from vllm_mlx.cli.options import load_settings
from vllm_mlx.cli.worker import leading
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.ranks import handshake, watch
from vllm_mlx.ranks.channel import Channel, Door, Lost, join
from vllm_mlx.ranks.handshake import facts_of, follow, lead
from vllm_mlx.ranks.lockstep import Ranks
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.util.tasks import settle

SECRET = b"a secret of the tests"
HOST = "127.0.0.1"
WAIT_S = 30.0
FACTS = facts_of(find_checkpoint("demo"))


class Told(list[str]):
    """What a side tells its user."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def append(self, text: str) -> None:
        with self._changed:
            super().append(text)
            self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self, WAIT_S), self


def later(work: Callable[[], Ranks]) -> "Future[Ranks]":
    done: Future[Ranks] = Future()
    threading.Thread(target=settle, args=(done, work), daemon=True).start()
    return done


def refusal(of: "Future[Ranks]") -> str:
    error = of.exception(WAIT_S)
    assert isinstance(error, ConfigError), error
    return error.message


def heard(channel: Channel, key: str) -> dict[str, Any]:
    """The first message that has such a key. A guest says that it is there when it is asked."""
    while key not in (message := channel.hear(WAIT_S)):
        if "joined" in message:
            channel.say({"here": True})
    return message


def nothing(*_: object) -> None:
    pass


class Sides:
    """Rank 0 and any number of workers, each on a thread."""

    def __init__(self) -> None:
        self.door = Door(HOST, 0, SECRET)
        self.told = Told()
        self.ends: SimpleQueue[Exception | None] = SimpleQueue()  # what watches report

    def lead(
        self, size: int = 2, check: Callable[..., object] = nothing, devices: Any = None, **facts: str
    ) -> "Future[Ranks]":
        own = {**FACTS, **facts}
        work = lambda: lead(  # noqa: E731
            self.door,
            size,
            own,
            told={"n": 7},
            devices=devices,
            check=check,
            tell=self.told.append,
            ended=self.ends.put,
        )
        return later(work)

    def follow(
        self, told: Told | None = None, check: Callable[..., object] = nothing, own: Any = None, facts: Any = ()
    ) -> "Future[Ranks]":
        tell = nothing if told is None else told.append
        own = own or (lambda: FACTS | dict(facts))
        address, ended = (HOST, self.door.port), self.ends.put
        return later(lambda: follow(address, SECRET, own, check=check, tell=tell, ended=ended))


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = Sides()
    yield sides
    sides.door.close()


def test_weights_of_the_same_size_are_told_apart(checkpoint: Callable[..., Path]) -> None:
    own, other = (facts_of(find_checkpoint(str(checkpoint("qwen3", seed=seed)))) for seed in (0, 7))
    assert own["config.json"] == other["config.json"] and own["weights"] != other["weights"]


@pytest.mark.parametrize("fact", ["protocol", "vllm-mlx", "mlx", "mlx-lm", "Python", "config.json", "weights"])
def test_a_difference_is_told_on_both_sides(sides: Sides, fact: str) -> None:
    zero, one = sides.lead(), sides.follow(facts={fact: "another"})
    advice = "the same files of the checkpoint" if fact in ("config.json", "weights") else "the same versions"
    text = refusal(zero)
    assert refusal(one) == text
    assert (
        f"Rank 0 refuses rank 1 (127.0.0.1): {fact} is another there and {FACTS[fact]} here. Install {advice}" in text
    )


def refuse(*_: object) -> None:
    raise ConfigError("its 3 heads do not divide by 2.")


def test_a_worker_that_cannot_take_part_ends_all(sides: Sides) -> None:
    zero, one, two = sides.lead(size=3), sides.follow(), sides.follow(check=refuse)
    text = refusal(zero)
    assert refusal(one) == refusal(two) == text
    assert text in {f"Rank {rank} (127.0.0.1) refuses to start: its 3 heads do not divide by 2." for rank in (1, 2)}


def test_a_worker_without_a_checkpoint_ends_all(sides: Sides) -> None:
    zero, one = sides.lead(), sides.follow(own=refuse)
    assert refusal(zero) == f"Rank 1 (127.0.0.1) refuses to start: {refusal(one)}"


def test_a_worker_without_a_checkpoint_waits_long_for_no_server(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TELL_S", 0.2)
    sides.door.close()
    assert refusal(sides.follow(own=refuse)) == "its 3 heads do not divide by 2."


def test_a_worker_that_refuses_tells_a_server_that_starts_later(sides: Sides) -> None:
    looked, port = threading.Event(), free_ports(1)[0]

    def own() -> dict[str, str]:
        looked.set()
        raise ConfigError("its 3 heads do not divide by 2.")

    one = later(lambda: follow((HOST, port), SECRET, own, check=nothing, tell=nothing, ended=nothing))
    assert looked.wait(WAIT_S)
    time.sleep(0.2)  # so that its first try fails
    sides.door.close()
    sides.door = Door(HOST, port, SECRET)
    assert refusal(sides.lead()) == f"Rank 1 (127.0.0.1) refuses to start: {refusal(one)}"


def test_rank_0_that_refuses_tells_workers_that_join_within_two_tries(sides: Sides) -> None:
    refused = threading.Event()

    def check(*_: object) -> None:
        refused.set()
        refuse()

    zero = sides.lead(size=3, check=check)
    assert refused.wait(WAIT_S)
    one, two = sides.follow(), sides.follow()
    assert refusal(one) == refusal(two) == refusal(zero)


def test_a_server_without_a_checkpoint_tells_its_workers(tmp_path: Path) -> None:
    secret, port = tmp_path / "secret", free_ports(1)[0]
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    one = later(lambda: follow((HOST, port), SECRET, lambda: FACTS, check=nothing, tell=nothing, ended=nothing))
    flags = {"tensor_parallel_size": 2, "worker_port": port, "secret_file": str(secret)}
    settings = load_settings({"model": str(tmp_path / "gone"), **flags})
    with (
        pytest.raises(ConfigError, match="No folder") as error,
        leading(settings, settings.engine_config(), Console(quiet=True)),
    ):
        pass
    assert refusal(one) == error.value.message


def test_rank_0_that_cannot_serve_tells_those_who_joined(sides: Sides) -> None:
    one = join(HOST, sides.door.port, SECRET, WAIT_S)
    while any(thread.name == "visitor" for thread in threading.enumerate()):
        time.sleep(0.01)  # until the door has let it in
    text = refusal(sides.lead(check=refuse))
    assert one.hear(WAIT_S) == {"refused": text}
    assert text == "Rank 0 refuses to start: its 3 heads do not divide by 2."


def test_both_sides_see_who_is_awaited_and_a_worker_may_leave(sides: Sides) -> None:
    told = Told()
    zero = sides.lead(size=3)
    sides.told.wait_for("0 of 2 workers joined")
    gone = join(HOST, sides.door.port, SECRET, WAIT_S)
    gone.say({"facts": FACTS, "host": "127.0.0.1:20000"})
    sides.told.wait_for("1 of 2 workers joined")
    gone.close()
    sides.follow(told)
    told.wait_for("1 of 2 workers joined")
    sides.follow(facts={"mlx": "another"})
    assert "Rank 0 refuses rank 2" in refusal(zero)


def test_a_worker_that_freezes_before_all_have_joined_is_only_awaited_again(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "SILENCE_S", 0.5)
    zero = sides.lead()
    frozen = join(HOST, sides.door.port, SECRET, WAIT_S)
    frozen.say({"facts": FACTS, "host": "127.0.0.1:20000"})
    sides.told.wait_for("1 of 1 workers joined")
    with pytest.raises(Lost, match="it has closed the connection"):
        while True:
            assert "rank" not in frozen.hear(WAIT_S)
    sides.follow(facts={"mlx": "another"})
    assert "Rank 0 refuses rank 1" in refusal(zero)


def test_a_worker_joins_again_when_rank_0_has_left(sides: Sides) -> None:
    told = Told()
    one = sides.follow(told)
    channel: Channel = sides.door.accept(WAIT_S)
    assert channel.hear(WAIT_S)["facts"] == FACTS
    channel.close()
    told.wait_for("The server at 127.0.0.1 is lost: it has closed the connection. Joining again.")
    sides.lead(mlx="another")
    assert "mlx is" in refusal(one)


def test_rank_0_that_ends_after_all_have_joined_is_a_loss(sides: Sides) -> None:
    one = sides.follow()
    channel = sides.door.accept(WAIT_S)
    channel.hear(WAIT_S)
    link: dict[str, Any] = {"hosts": [], "devices": None, "coordinator": ""}
    channel.say({"rank": 1, "size": 2, "told": {}, "link": link})
    heard(channel, "ready")
    channel.close()
    assert isinstance(one.exception(WAIT_S), Lost)


def test_rank_0_that_is_stopped_while_ranks_check_their_model_ends_workers_in_good_order(sides: Sides) -> None:
    one = sides.follow()
    channel = sides.door.accept(WAIT_S)
    channel.hear(WAIT_S)
    channel.say({"rank": 1, "size": 2, "told": {}, "link": {"hosts": [], "devices": None, "coordinator": ""}})
    channel.say({"stop": True, "refuses": False})
    assert sides.ends.get(timeout=WAIT_S) is None
    assert one.exception(WAIT_S) is not None


def test_a_worker_that_freezes_while_it_checks_its_model_is_lost(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOADING_SILENCE_S", 1.0)
    sides.lead()
    guest = join(HOST, sides.door.port, SECRET, WAIT_S)
    guest.say({"facts": FACTS, "host": "127.0.0.1:20000"})
    heard(guest, "rank")
    heard(guest, "beat")
    assert "Rank 1 (127.0.0.1) is lost: it has said nothing for 1." in str(sides.ends.get(timeout=WAIT_S))
    assert "Rank 1 (127.0.0.1) is lost" in heard(guest, "stop")["stop"]


def test_a_worker_of_another_protocol_is_told(sides: Sides) -> None:
    zero = sides.lead()
    other = join(HOST, sides.door.port, SECRET, WAIT_S)
    other.say({"hello": 1})
    assert "Rank 0 refuses rank 1 (127.0.0.1): protocol is None there" in refusal(zero)
    assert "protocol is None there" in other.hear(WAIT_S)["refused"]


@pytest.mark.skipif(mx.distributed.is_available("jaccl"), reason="this machine has RDMA")
def test_a_machine_without_rdma_refuses_it(sides: Sides) -> None:
    devices = [[None, "rdma_en5"], ["rdma_en5", None]]
    assert "Rank 0 refuses to start: This machine has no RDMA" in refusal(sides.lead(devices=devices))
    one = sides.follow()
    channel = sides.door.accept(WAIT_S)
    channel.hear(WAIT_S)
    channel.say({"rank": 1, "size": 2, "told": {}, "link": {"hosts": [], "devices": devices, "coordinator": ""}})
    refused = heard(channel, "stop")
    assert refused == {"stop": refusal(one), "refuses": True}
    assert refused["stop"].startswith("Rank 1 (127.0.0.1) refuses to start: This machine has no RDMA")
