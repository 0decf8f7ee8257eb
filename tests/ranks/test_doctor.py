"""What `doctor` says of a model on several Macs: two processes of the command line."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import call, run
from tests.support.rank_processes import Macs, macs
from tests.support.two_ranks import HOST, free_ports
from vllm_mlx.cli.doctor import check_workers
from vllm_mlx.cli.options import load_settings
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.ranks.channel import join
from vllm_mlx.ranks.handshake import facts_of, follow
from vllm_mlx.ranks.lockstep import Ranks
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.util.tasks import settle

Make = Callable[..., Path]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def both(tmp_path: Path, checkpoint: Make) -> Iterator[Macs]:
    with macs(tmp_path, checkpoint("qwen3")) as found:
        yield found


def checked(both: Macs, *flags: str, command: Callable[..., Any] = run) -> tuple[int, dict[str, tuple[str, str]]]:
    """Run `doctor` in the place of the server. Returns its exit code and what it found."""
    place = ["--worker-port", str(both.worker_port), "--secret-file", str(both.secret), *flags]
    result = command("doctor", str(both.model), "--workers", "--quick", "--json", *place, VLLM_MLX_PORT="0")
    return result.returncode, {check["name"]: (check["verdict"], check["text"]) for check in json.loads(result.stdout)}


@pytest.mark.full
def test_doctor_checks_the_link_to_a_worker_and_lets_it_go(both: Macs) -> None:
    worker = both.start_worker()
    code, found = checked(both, "--tensor-parallel-size", "2")
    assert (code, worker.code()) == (0, 0), worker.printed
    assert found["Workers"][0] == "good"
    assert "of weights and 0.5 kB a token of context on each of 2 Macs; one Mac would take 1.1 MB" in found["Macs"][1]
    assert "a token waits for 9: " in found["Link"][1]
    assert found["Sums"][1].startswith("right over the link, also those of 2,048 tokens; ")
    assert "on each of 2 Macs" in found[f"Model {both.model}"][1]


@pytest.mark.parametrize(
    ("fact", "advice"), [("mlx", "versions of everything"), ("weights", "files of the checkpoint")]
)
def test_what_differs_on_a_worker_is_bad_and_the_worker_is_told(tmp_path: Path, fact: str, advice: str) -> None:
    """The worker is a thread, which takes part until the link would be connected."""
    secret, port = tmp_path / "secret", free_ports(1)[0]
    secret.write_text("a secret of the tests")
    secret.chmod(0o600)
    facts = facts_of(find_checkpoint("demo")) | {fact: "another"}
    worker: Future[Ranks] = Future()

    def work() -> Ranks:
        address, none = (HOST, port), lambda *_: None
        return follow(address, secret.read_bytes(), lambda: facts, check=none, tell=none, ended=none)

    threading.Thread(target=settle, args=(worker, work), daemon=True).start()
    flags = {
        "model": "demo",
        "text_only": True,
        "tensor_parallel_size": 2,
        "worker_port": port,
        "secret_file": str(secret),
    }
    [check] = check_workers(load_settings(flags))
    error = worker.exception(60)
    assert isinstance(error, ConfigError) and f"{error.message}" == f"{check.text}."
    assert (check.name, check.verdict) == ("Workers", "bad")
    assert f"{fact} is another there" in check.text and f"Install the same {advice} on all Macs" in check.text


SLOWLY = """
import json, sys, time
from vllm_mlx.cli.doctor import check_workers
from vllm_mlx.cli.options import load_settings
model, port, secret = sys.argv[1:]
flags = {"model": model, "tensor_parallel_size": 2, "worker_port": port, "secret_file": secret}
for check in check_workers(load_settings(flags)):
    print(json.dumps([check.verdict, check.name, check.text]))
    time.sleep(check.name == "Sums")
"""


def test_a_worker_stays_until_doctor_lets_it_go(both: Macs) -> None:
    worker = both.start_worker()
    command = [sys.executable, "-c", SLOWLY, str(both.model), str(both.worker_port), str(both.secret)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, worker.code()) == (0, 0), result.stderr
    checks = [json.loads(line) for line in result.stdout.splitlines()]
    assert [check[:2] for check in checks] == [["good", name] for name in ("Workers", "Macs", "Link", "Sums")]
    _, macs, link, sums = (text for *_, text in checks)
    assert "of weights and 0.5 kB a token of context on each of 2 Macs; one Mac would take 1.1 MB" in macs
    assert "a token waits for 9: " in link
    assert sums.startswith("right over the link, also those of 2,048 tokens; ")


def test_doctor_tells_a_worker_to_check_only_and_why_a_worker_has_left(both: Macs) -> None:
    """The worker is a bare channel, which refuses once it has its rank."""
    doctor = both.start_doctor()
    channel = join(HOST, both.worker_port, both.secret.read_bytes(), 60)
    channel.say({"facts": facts_of(find_checkpoint(str(both.model))), "host": f"{HOST}:20000"})
    while "rank" not in (message := channel.hear(60)):
        channel.say({"here": True})
    assert message["told"]["only_checks"] is True and message["told"]["max_prefill_chunk"] == 2048
    channel.say({"stop": "its 3 heads do not divide by 2.", "refuses": True})
    assert doctor.code() == 1
    text = " ".join(doctor.printed.split())
    assert f"Workers Rank 1 ({HOST}) refuses to start: its 3 heads do not divide by 2" in text


def test_doctor_wants_to_know_how_many_macs(tmp_path: Path, checkpoint: Make) -> None:
    result = call("doctor", str(checkpoint("qwen3")), "--workers", "--quick", VLLM_MLX_PORT="0", COLUMNS="200")
    assert result.returncode == 1
    assert "Workers      Say how many Macs with --tensor-parallel-size, from 2 to 8" in result.stdout


def test_a_model_that_cannot_be_cut_is_bad(both: Macs, checkpoint: Make) -> None:
    both.model = checkpoint("gemma3_text")
    code, found = checked(both, "--tensor-parallel-size", "2", command=call)
    assert code == 1
    assert "mlx-lm has no tensor parallelism for 'gemma3_text'" in found[f"Model {both.model}"][1]
