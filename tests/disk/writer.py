"""A server's part in the tests of kills.

`python -m tests.disk.writer FOLDER SALT` goes on with one conversation until it is killed. It prints the number of
each record that it has written.
"""

import sys
from pathlib import Path

from tests.disk.samples import folder, numbers, run
from vllm_mlx.disk.folder import Folder
from vllm_mlx.disk.record import Header, Record

TOKENS = 8
LARGE = [("keys", "BF16", (5, 3000)), ("values", "BF16", (5, 3000)), ("states", "F32", (100,))]


def link(number: int, parent: str, salt: str) -> Header:
    return run(TOKENS * number, TOKENS, parent=parent, seed=number, salt=salt)


def number_of(record: Record) -> int:
    return record.header.start // TOKENS


def chain(place: Folder, salt: str) -> None:
    found = list(place.scan())
    parent = found[-1].name if found else ""
    number = len(found)
    while True:
        parent = place.add(link(number, parent, salt), numbers(number, LARGE)).name
        print(number, flush=True)
        number += 1


if __name__ == "__main__":
    chain(folder(Path(sys.argv[1])), sys.argv[2])
