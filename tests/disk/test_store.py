"""What is removed from disk, for room or for a user, goes from the index at once and from the folder after that."""

from dataclasses import dataclass, field

import pytest

from vllm_mlx.cache.index import pack
from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.cache.tree import MemoryAwarePrefixCache
from vllm_mlx.disk.record import Header, Record
from vllm_mlx.disk.store import DiskStore

NUM_RECORDS = 1000
FILE_BYTES = 1_000_000
RULE = ResumeRule()


@dataclass
class Files:
    """A folder's files, by name."""

    names: set[str] = field(default_factory=set)

    def note_model(self, fingerprint: str, model: str) -> None: ...

    def remove(self, records: list[Record]) -> None:
        self.names.difference_update(record.name for record in records)

    @property
    def database(self) -> "Files":
        return self

    def shorten(self) -> None: ...


def record(number: int, salt: str = "") -> Record:
    header = Header(
        kind="run", fingerprint="model", salt=salt, parent="", start=0, words=pack([number, *range(40)]),
        layout={}, s_per_token=1.0, rule=RULE,
    )  # fmt: skip
    return Record(name=f"{number}", header=header, tensors=(), file_bytes=FILE_BYTES, used_s=float(number))


class Filled:
    """A store of many records."""

    def __init__(self, num_records: int = NUM_RECORDS, salts: tuple[str, ...] = ("",)):
        self.files = Files()
        memory = MemoryAwarePrefixCache(max_bytes=1 << 30)
        memory.add_model("model", RULE, s_per_token=1.0)
        self.store = DiskStore(self.files, memory)  # type: ignore[arg-type]
        self.store.add_model("model", "Model")
        self.records = [record(number, salts[number % len(salts)]) for number in range(num_records)]
        for one in self.records:
            self.files.names.add(one.name)
            assert self.store.add(one)

    def wait(self) -> None:
        """Let the files go."""
        while self.store.is_removing:
            self.store.threads.take_news(10.0)


def test_room_is_made_by_what_is_least_worth() -> None:
    filled = Filled()
    assert filled.store.make_room(50 * FILE_BYTES) == 50 * FILE_BYTES
    assert filled.store.is_removing
    filled.wait()
    assert filled.files.names == {one.name for one in filled.records[50:]}, "the ones that were used longest ago went"


@pytest.mark.parametrize("num_records", [0, 3])
def test_no_more_is_freed_than_there_is(num_records: int) -> None:
    filled = Filled(num_records)
    assert filled.store.make_room(100 * FILE_BYTES) == num_records * FILE_BYTES
    filled.wait()
    assert not filled.files.names
