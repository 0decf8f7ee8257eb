"""Servers that are killed while they write, and servers that share a folder: nobody is served a damaged byte."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.disk.samples import expected, folder, on_disk, read
from tests.disk.writer import CAP, LARGE, number_of
from vllm_mlx.disk.ledger import Ledger
from vllm_mlx.disk.own_files import LEDGER

NUM_KILLS, KILLS_A_TEST = 200, 20


def kill_once(root: Path, seed: int) -> int:
    """Kill a writer at a random moment. Returns how many records it left.

    A writing is some milliseconds, so the moment lies in a writing, or in what is done before and after it.
    """
    rng = random.Random(f"kill {seed}")
    command = [sys.executable, "-m", "tests.disk.writer", "chain", str(root), f"conversation {seed}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 4)):
            process.stdout.readline()
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        reported = [int(line) for line in process.stdout]
    place = folder(root)
    records = list(place.scan())
    assert [number_of(record) for record in records] == list(range(len(records)))
    assert len(records) > max(reported, default=0), "a record that was written is lost"
    for number, record in enumerate(records):
        assert read(place, record) == expected(number, LARGE)
    assert not place.damages and not list(root.rglob("*.draft"))
    assert place.usage().used_bytes == on_disk(root)
    return len(records)


def kill(root: Path, seeds: range) -> None:
    """Every second kill hits a writer that goes on with what the one before left."""
    for seed in seeds:
        place = root / f"{seed}"
        left = kill_once(place, seed)
        if seed % 2:
            assert kill_once(place, seed) >= left


def test_a_killed_writer_loses_only_what_was_not_written(tmp_path: Path) -> None:
    kill(tmp_path, range(4))


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, NUM_KILLS, KILLS_A_TEST))
def test_200_kills_lose_only_what_was_not_written(tmp_path: Path, first: int) -> None:
    """A failure names the first seed of its range, and the folder of its own."""
    kill(tmp_path, range(first, first + KILLS_A_TEST))


def test_servers_on_one_folder_never_read_wrong_bytes_and_keep_the_cap(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.disk.writer", "churn", str(tmp_path)]
    processes = [subprocess.Popen([*command, str(seed)], stderr=subprocess.PIPE, text=True) for seed in range(3)]
    most = 0
    while any(process.poll() is None for process in processes):
        with Ledger(tmp_path / LEDGER).locked():  # nobody adds or removes a file
            most = max(most, on_disk(tmp_path))
        time.sleep(0.01)
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, errors
    assert most <= CAP
    place = folder(tmp_path, max_bytes=CAP)
    records = list(place.scan())
    assert records and not place.damages
    for record in records:
        assert read(place, record) == expected(number_of(record), LARGE)
    assert place.usage().used_bytes == on_disk(tmp_path) <= CAP
