"""Which conversations records form, and what may be removed: compared with the complete token paths of each."""

import itertools
import random
from dataclasses import dataclass, field

import pytest

from vllm_mlx.disk.conversations import conversations, least_recently_used, unused_since, with_what_follows
from vllm_mlx.disk.record import WORD_BYTES, Header, Record, name_of

SEEDS = range(20)


@dataclass
class Grown:
    """Records that continue each other at random places. No two of their words are equal, so paths tell them apart."""

    seed: int
    records: list[Record] = field(default_factory=list)
    paths: dict[str, bytes] = field(default_factory=dict)  # all words up to the record's end, by name

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.words = itertools.count(1)
        for _ in range(self.random.randint(1, 14)):
            runs = [record for record in self.records if record.header.kind == "run"]
            parent = self.random.choice([None, *runs]) if runs else None
            is_state = parent is not None and self.random.random() < 0.3
            self.add(parent, 0 if is_state else self.random.randint(1, 5))

    def add(self, parent: Record | None, num_words: int) -> None:
        own = b"".join(next(self.words).to_bytes(WORD_BYTES, "big") for _ in range(num_words))
        start = 0 if parent is None else self.random.randint(parent.header.start + 1, parent.header.end)
        header = Header(
            kind="run" if own else "state", fingerprint="f", salt="", parent="" if parent is None else parent.name,
            start=start, words=own, layout={}, s_per_token=0.0, rule={},
        )  # fmt: skip
        name = name_of(header)
        if name not in self.paths:
            before = b"" if parent is None else self.paths[parent.name][: start * WORD_BYTES]
            self.paths[name] = before + own
            size, used_s = self.random.randint(1, 100), float(self.random.randint(0, 50))
            self.records.append(
                Record(name=name, header=header, tensors=(), file_bytes=size, used_s=used_s, digest="", save="")
            )

    def needs(self, record: Record, path: bytes) -> bool:
        """Whether who resumes on this path would read something of the record."""
        reaches = self.paths[record.name][: (record.header.start + (record.header.kind == "run")) * WORD_BYTES]
        return path.startswith(reaches)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_complete_path_is_a_conversation(seed: int) -> None:
    grown = Grown(seed)
    runs = [grown.paths[record.name] for record in grown.records if record.header.kind == "run"]
    ends = {path for path in runs if not any(other != path and other.startswith(path) for other in runs)}
    found = conversations(grown.records)
    assert {grown.paths[conversation.name] for conversation in found} == ends
    for conversation in found:
        path = grown.paths[conversation.name]
        needed = [record for record in grown.records if grown.needs(record, path)]
        assert {record.name for record in conversation.records} == {record.name for record in needed}
        assert conversation.num_tokens == len(path) // WORD_BYTES
        assert conversation.num_bytes == sum(record.file_bytes for record in needed)
        others = ends - {path}
        own = [record for record in needed if not any(grown.needs(record, other) for other in others)]
        assert conversation.own_bytes == sum(record.file_bytes for record in own)


def is_removable(order: list[Record], records: list[Record]) -> bool:
    """Whether each record is removed before what it continues, and nothing stays without it."""
    names = [record.name for record in order]
    children = {record.name: record.header.parent for record in records if record.header.parent in names}
    return len(set(names)) == len(names) and all(
        child in names and names.index(child) < names.index(parent) for child, parent in children.items()
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_what_continues_a_removed_record_goes_first(seed: int) -> None:
    grown = Grown(seed)
    chosen = set(grown.random.sample([record.name for record in grown.records], k=len(grown.records) // 2))
    order = with_what_follows(grown.records, lambda record: record.name in chosen)
    assert chosen <= {record.name for record in order}
    assert is_removable(order, grown.records)
    for record in order:  # Nothing goes without a reason.
        path = grown.paths[record.name][: (record.header.start + (record.header.kind == "run")) * WORD_BYTES]
        assert record.name in chosen or any(
            other.name in chosen and other.name != record.name and grown.needs(other, path) for other in grown.records
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_used_longest_ago_goes_until_there_is_room(seed: int) -> None:
    grown = Grown(seed)
    total = sum(record.file_bytes for record in grown.records)
    for wanted in (-1, 0, 1, total // 2, total, total + 1):
        order = least_recently_used(grown.records, wanted)
        sizes = [record.file_bytes for record in order]
        assert is_removable(order, grown.records)
        assert sum(sizes) >= min(wanted, total) and (not sizes or sum(sizes[:-1]) < wanted)
        left = list(grown.records)
        for record in order:
            parents = {other.header.parent for other in left}
            assert record.used_s == min(other.used_s for other in left if other.name not in parents)
            left.remove(record)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_not_used_goes_unless_something_used_continues_it(seed: int) -> None:
    grown = Grown(seed)
    by_name = {record.name: record for record in grown.records}
    for unix_s in (0.0, 25.0, 51.0):
        order = unused_since(grown.records, unix_s)
        assert is_removable(order, grown.records)
        kept = set()
        for record in grown.records:
            name = record.name if record.used_s >= unix_s else ""
            while name:
                kept.add(name)
                name = by_name[name].header.parent
        assert {record.name for record in order} == by_name.keys() - kept
