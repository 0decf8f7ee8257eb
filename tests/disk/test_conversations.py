"""Which conversations records form: compared with the complete token paths of each."""

import itertools
import random
from dataclasses import dataclass, field

import pytest

from vllm_mlx.disk.conversations import conversations
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
            self.records.append(Record(name=name, header=header, tensors=(), file_bytes=size, used_s=used_s, digest=""))

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
