"""Remembered values of processes that are killed at any moment: between two writes, and in one."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rows import cases

from .test_kept import journals, restored

NUM_KEPT = 5
CODE = f"""
import sys
from pathlib import Path
from vllm_mlx.disk.database import Database
from vllm_mlx.disk.kept import Journals
opened = Journals(Database(Path(sys.argv[1])), max_bytes=400_000)
journal = opened.open("notes")
number = int(sys.argv[2])
while True:
    journal.put(str(number), "", lambda number=number: [number] * (number % 1000), num_bytes=1)
    journal.drop([str(number - {NUM_KEPT})])
    number += 1
    if number % 20 == 0 and opened.flush(60):
        print(number - 1, flush=True)
"""


def killed(folder: Path, first: int, num_lines: int, seed: random.Random) -> int:
    """Runs a process until it has printed so many lines and a moment more. Returns the last number it had flushed."""
    process = subprocess.Popen([sys.executable, "-c", CODE, str(folder), str(first)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        lines = [process.stdout.readline() for _ in range(num_lines)]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(seed.random() / 20)
        process.kill()
        lines += process.stdout.readlines()
    process.wait(30)
    return int([line for line in lines if line.endswith("\n")][-1])


@pytest.mark.parametrize("seed", cases(range(50), range(2)))
def test_what_was_flushed_is_there_and_nothing_is_wrong(tmp_path: Path, seed: int) -> None:
    drawn, first = random.Random(seed), 0
    for _ in range(4):
        flushed = killed(tmp_path, first, drawn.randint(1, 40), drawn)
        with journals(tmp_path, max_bytes=400_000) as opened:
            found = {int(value.name): value.value() for value in restored(opened.open("notes"))}
        assert all(value == [number] * (number % 1000) for number, value in found.items())
        last = max(found)
        assert last >= flushed
        assert set(range(last - NUM_KEPT + 1, last + 1)) <= found.keys()
        first = last + 1
