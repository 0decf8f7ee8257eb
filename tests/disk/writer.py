"""A server's part in the tests of kills and of shared folders: a process that writes, reads and removes records.

`python -m tests.disk.writer chain FOLDER SEED` goes on with one conversation until it is killed, and prints the
number of each record that it has written. `... churn FOLDER SEED` does random things for a while.
"""

import random
import sys
from pathlib import Path

from tests.disk.samples import expected, folder, numbers, read, run
from vllm_mlx.disk.folder import Folder
from vllm_mlx.disk.record import Header, Record
from vllm_mlx.disk.space import NoRoom

TOKENS = 8
LARGE = [("keys", "BF16", (5, 3000)), ("values", "BF16", (5, 3000)), ("states", "F32", (100,))]
CAP = 1_000_000  # for the churn: 15 large records and more small ones


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


def churn(place: Folder, rng: random.Random) -> None:
    """Every record's numbers follow from its place, so that a wrong one is seen by any process."""
    held: dict[str, Record] = {record.name: record for record in place.scan()}
    for _ in range(300):
        try:
            match rng.randrange(5):
                case 0 | 1:
                    parent = rng.choice([None, *held.values()])
                    number = 0 if parent is None else number_of(parent) + 1
                    salt = f"salt {rng.randrange(3)}" if parent is None else parent.header.salt
                    name = parent.name if parent else ""
                    record = place.add(link(number, name, salt), numbers(number, LARGE))
                    held[record.name] = record
                case 2:
                    if held:
                        record = rng.choice(list(held.values()))
                        assert read(place, record) == expected(number_of(record), LARGE), "wrong bytes"
                        place.touch(record)
                case 3:
                    changes = place.changes()
                    held |= {record.name: record for record in changes.added}
                    held = {name: record for name, record in held.items() if name not in changes.removed}
                case 4 if rng.random() < 0.3:
                    held = {record.name: record for record in place.scan()}
        except FileNotFoundError:  # the other removed it
            held = {record.name: record for record in place.scan()}
        except NoRoom:
            parents = {record.header.parent for record in held.values()}
            for record in [record for record in held.values() if record.name not in parents][:4]:
                place.remove(held.pop(record.name))
    assert not place.damages, place.damages


if __name__ == "__main__":
    what, root, seed = sys.argv[1:]
    if what == "chain":
        chain(folder(Path(root)), seed)
    else:
        churn(folder(Path(root), max_bytes=CAP), random.Random(seed))
