"""Servers that are killed while they write: what they had written is there, and no damaged byte is served."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.disk.samples import expected, on_disk, opened, read
from tests.disk.writer import LARGE, number_of

NUM_KILLS, KILLS_A_TEST = 200, 20


def kill_once(root: Path, seed: int) -> int:
    """Kill a writer at a random moment. Returns how many records it left.

    A writing is some milliseconds, so the moment lies in a writing, or in what is done before and after it.
    """
    rng = random.Random(f"kill {seed}")
    command = [sys.executable, "-m", "tests.disk.writer", str(root), f"conversation {seed}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 4)):
            process.stdout.readline()
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        reported = [int(line) for line in process.stdout]
    with opened(root) as place:
        records = list(place.scan())
        assert [number_of(record) for record in records] == list(range(len(records)))
        assert len(records) > max(reported, default=0), "a record that was written is lost"
        for number, record in enumerate(records):
            assert read(place, record) == expected(number, LARGE)
        assert not place.damages and len(list(root.rglob("*.kv"))) == len(records)
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
