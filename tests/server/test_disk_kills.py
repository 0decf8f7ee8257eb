"""A server that is killed at any moment and started again serves the same replies, from what it had written."""

import random
import time
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.commands import address, served
from tests.support.running import serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import open_disk, start_engine

TEXT = "The quick brown fox jumps over the lazy dog. "


def prompt_of(turn: int) -> str:
    return "".join(f"{number}: {TEXT}" for number in range(6 * (turn + 1)))


def ask(url: str, turn: int) -> str:
    body = {"prompt": prompt_of(turn), "max_tokens": 12, "temperature": 0}
    with httpx.Client(timeout=60, trust_env=False) as http:
        reply = http.post(f"{url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def kill_at_random_moments(root: Path, seeds: range, num_turns: int) -> None:
    """The last server of each seed ends in this process, because nothing follows its end."""
    path = str(checkpoint("qwen3"))
    with serving(start_engine(EngineConfig(model=path))) as server:
        expected = [ask(server.url, turn) for turn in range(num_turns)]
    for seed in seeds:
        rng = random.Random(f"kill {seed}")
        folder = root / str(seed)
        for turn in range(num_turns - 1):
            log = root / f"{seed}-{turn}.log"
            with log.open("w") as stderr, served(
                path, "--cache-disk", "1GB", "--cache-dir", str(folder), stderr=stderr
            ) as (_, printed):  # fmt: skip
                for earlier in range(turn + 1):
                    assert ask(address(printed), earlier) == expected[earlier], (seed, turn, earlier)
                time.sleep(rng.uniform(0, 3))
            assert "Traceback" not in log.read_text(), (seed, turn)
        config = EngineConfig(model=path, cache_disk_bytes=10**9, cache_dir=str(folder))
        with serving(start_engine(config, open_disk(config))) as server:
            assert [ask(server.url, turn) for turn in range(num_turns)] == expected, seed


@pytest.mark.full
@pytest.mark.parametrize("first", range(1, 21, 5))
def test_twenty_killed_servers_go_on_with_the_same_replies(tmp_path: Path, first: int) -> None:
    kill_at_random_moments(tmp_path, range(first, first + 5), 3)
