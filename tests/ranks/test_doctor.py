"""What `doctor` says of a model on several Macs: two processes of the command line."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import call, run
from tests.support.rank_processes import Macs, macs

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


def test_doctor_checks_the_link_to_a_worker_and_lets_it_go(both: Macs) -> None:
    worker = both.start_worker()
    code, found = checked(both, "--tensor-parallel-size", "2")
    assert (code, worker.code()) == (0, 0), worker.printed
    assert found["Workers"][0] == "good"
    assert "of weights and 0.5 kB a token of context on each of 2 Macs; one Mac would take 1.1 MB" in found["Macs"][1]
    assert "a token waits for 9: " in found["Link"][1]
    assert found["Sums"][1].startswith("right over the link, also those of 2,048 tokens; ")
    assert "on each of 2 Macs" in found[f"Model {both.model}"][1]


SLOWLY = """
import sys, time
from vllm_mlx.cli.doctor import check_workers
from vllm_mlx.cli.options import load_settings
model, port, secret = sys.argv[1:]
flags = {"model": model, "tensor_parallel_size": 2, "worker_port": port, "secret_file": secret}
for check in check_workers(load_settings(flags)):
    print(check.verdict, check.name)
    time.sleep(1)
"""


@pytest.mark.full
def test_a_worker_stays_until_doctor_lets_it_go(both: Macs) -> None:
    worker = both.start_worker()
    command = [sys.executable, "-c", SLOWLY, str(both.model), str(both.worker_port), str(both.secret)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, worker.code()) == (0, 0), result.stderr
    assert result.stdout.split() == ["good", "Workers", "good", "Macs", "good", "Link", "good", "Sums"]


@pytest.mark.full  # with every run: `serve` refuses it
def test_doctor_says_why_a_worker_cannot_take_part(both: Macs, checkpoint: Make) -> None:
    worker = both.start_worker(checkpoint("llama"))
    code, found = checked(both, "--tensor-parallel-size", "2")
    assert (code, worker.code()) == (1, 1)
    assert found["Workers"][0] == "bad" and "files of the checkpoint on all Macs" in found["Workers"][1]


def test_doctor_wants_to_know_how_many_macs(tmp_path: Path, checkpoint: Make) -> None:
    result = call("doctor", str(checkpoint("qwen3")), "--workers", "--quick", VLLM_MLX_PORT="0", COLUMNS="200")
    assert result.returncode == 1
    assert "Workers      Say how many Macs with --tensor-parallel-size, from 2 to 8" in result.stdout


def test_a_model_that_cannot_be_cut_is_bad(both: Macs, checkpoint: Make) -> None:
    both.model = checkpoint("gemma3_text")
    code, found = checked(both, "--tensor-parallel-size", "2", command=call)
    assert code == 1
    assert "mlx-lm has no tensor parallelism for 'gemma3_text'" in found[f"Model {both.model}"][1]
