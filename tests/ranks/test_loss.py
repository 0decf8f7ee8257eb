"""Two ranks of the command line: what the status says of them, and what happens when one is killed or frozen.

At any moment: clean errors, exit code 75 of all that is left, and a new start.

The long form runs by seed: `-m full -k "seed17"` repeats one of its cases.
"""

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.commands import address, run, served
from tests.support.rank_processes import LIMIT_S, Macs, Stream, macs, reply
from tests.support.two_ranks import HOST

LOST, REFUSED = 75, 1
PROMPT = list(range(20, 60))
MOST_S = 6.0  # from a signal to the end of the other rank
MOST_LOADING_S = 10.0
PHASES = ("load", "prefill", "decode", "restore", "idle")


@pytest.fixture
def both(tmp_path: Path, checkpoint: Callable[..., Path]) -> Iterator[Macs]:
    with macs(tmp_path, checkpoint("qwen3")) as found:
        yield found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Iterator[Macs]:
    """Both, started. The last test that takes them stops them."""
    model = checkpoint("qwen3", num_hidden_layers=2)  # each layer waits twice for the other rank
    with macs(tmp_path_factory.mktemp("running"), model) as found:
        found.start()
        yield found


def test_status_and_metrics_describe_each_mac(running: Macs) -> None:
    server = running.server
    assert server is not None
    assert "Macs" in server.printed and "experimental: " in server.printed and "Link" in server.printed
    assert "On disk" not in server.printed
    reply(running.url, list(range(20, 60)), 20)
    while True:  # the worker's last heartbeat may be older than its last plan
        status = httpx.get(f"{running.url}/v1/status").json()
        first, second = status["ranks"]
        if first["plan"] == second["plan"] > 20:
            break
    assert [first["rank"], second["rank"], first["host"]] == [0, 1, "127.0.0.1"]
    assert second["lag_plans"] == 0 and second["active_bytes"] > 0 and second["sum_s"] > 0
    metrics = httpx.get(f"{running.url}/metrics").text
    assert f'vllm_mlx_rank_plan{{model_name="{Path(running.model).name}",rank="1"}} {second["plan"]:.1f}' in metrics
    view = run("status", "--once", "--url", running.url).stdout
    assert "Rank 1    127.0.0.1, " in view


def test_a_frozen_worker_ends_replies_with_an_error_and_both_start_again(running: Macs) -> None:
    both, server, worker = running, running.server, running.worker
    assert server is not None and worker is not None
    assert "1 of 1 workers joined" in worker.printed and "1 of 1 workers joined" in server.printed
    stream = Stream(both.url, PROMPT, 4000)
    stream.wait_for(3)
    worker.send(signal.SIGSTOP)
    error = stream.ended()
    assert re.search(rf"Rank 1 \({HOST}\) is lost: it has said nothing for [34]\.\d s\.", error)
    assert server.code() == LOST
    assert server.printed.splitlines()[-1] == f"vllm-mlx: {error}"
    worker.send(signal.SIGCONT)
    assert worker.code() == LOST
    server, worker = both.start()
    assert reply(both.url, PROMPT, 40).startswith(stream.text[:20])
    server.send(signal.SIGTERM)
    assert (server.code(), worker.code()) == (0, 0)
    assert server.printed.endswith("Stopped.\n") and worker.printed.endswith("Stopped.\n")


def test_another_checkpoint_is_refused_on_both_sides(both: Macs, checkpoint: Callable[..., Path]) -> None:
    server = both.start_server()
    server.wait_for("0 of 1 workers joined")
    worker = both.start_worker(checkpoint("llama"))
    assert (server.code(), worker.code()) == (REFUSED, REFUSED)
    for process in (server, worker):
        last = process.printed.splitlines()[-1]
        assert last.startswith(f"vllm-mlx: Rank 0 refuses rank 1 ({HOST}): config.json is ")
        assert last.endswith("Install the same files of the checkpoint on all Macs.")


# The long form


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Iterator[Macs]:
    """The same ports and folders for all cases, so that each case is a new start after the one before."""
    with macs(tmp_path_factory.mktemp("macs"), checkpoint("qwen3")) as found:
        yield found


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[..., Path]) -> Iterator[str]:
    """Address of a server of one process, whose replies are right."""
    with served(str(checkpoint("qwen3")), "--log-level", "warning") as (_, printed):
        yield address(printed)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(60), ids=lambda seed: f"seed{seed}")
def test_a_lost_rank_ends_all_at_any_moment(cluster: Macs, alone: str, seed: int) -> None:
    draw = random.Random(seed)
    phase, how = PHASES[seed % 5], (signal.SIGKILL, signal.SIGSTOP)[seed // 10 % 2]
    worker, server = cluster.start_worker(), cluster.start_server("--max-prefill-chunk", "64")
    victim, other = (server, worker) if seed // 5 % 2 else (worker, server)
    streams: dict[Stream, str] = {}
    if phase == "load":
        server.wait_for("Loading")
        time.sleep(draw.uniform(0, 1))
    else:
        server.wait_for("Ctrl-C stops")
        prompt = [draw.randrange(20, 900) for _ in range(2000 if phase == "prefill" else 150)]
        prompts = [prompt, prompt[: draw.randrange(20, 100)]]
        right = {len(each): reply(alone, each, 60) for each in prompts}
        if phase in ("restore", "idle"):
            assert reply(cluster.url, prompts[0], 60) == right[len(prompt)]
        if phase != "idle":
            streams = {
                Stream(cluster.url, each, 60 if phase == "restore" else 3000): right[len(each)] for each in prompts
            }
        if phase == "decode":
            next(iter(streams)).wait_for(draw.randrange(1, 30))
        time.sleep(draw.uniform(0, 0.5))
    victim.send(how)
    start = time.monotonic()
    code = other.code(MOST_LOADING_S * 2)
    took_s = time.monotonic() - start
    assert code == LOST, other.printed
    assert took_s < (MOST_LOADING_S if phase == "load" else MOST_S), other.printed
    assert "vllm-mlx: Rank " in other.printed.splitlines()[-1], other.printed  # MLX may write into the same line
    if how == signal.SIGSTOP:
        victim.send(signal.SIGCONT)
        assert victim.code(LIMIT_S) == LOST, victim.printed
    for stream, text in streams.items():
        end = stream.ended()
        assert stream.text[: len(text)] == text[: len(stream.text)]
        if other is server:
            assert end == "[DONE]" or "Rank 1" in end or "restart of all ranks" in end, end
        if how == signal.SIGKILL and other is worker:
            assert end in ("[DONE]", "cut")


@pytest.mark.full
def test_a_server_that_is_stopped_while_it_loads_ends_workers_in_good_order(both: Macs) -> None:
    worker, server = both.start_worker(), both.start_server()
    server.wait_for("Loading")
    server.send(signal.SIGTERM)
    assert (server.code(), worker.code()) == (0, 0), worker.printed


@pytest.mark.full
def test_after_all_losses_the_ranks_reply_as_before(cluster: Macs, alone: str) -> None:
    cluster.start()
    assert reply(cluster.url, PROMPT, 60) == reply(alone, PROMPT, 60)
