"""The index of what is on disk: what it holds is what a restart finds, whatever was trimmed and written again."""

import random
from dataclasses import replace

import pytest

from vllm_mlx.cache.index import WORD_BYTES, pack
from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.disk.index import DiskIndex
from vllm_mlx.disk.record import Header, Record, Tensor

SPACE = ("model", "")
RULES = (ResumeRule(), ResumeRule(needs_state=True), ResumeRule(window=4))


class Disk:
    """Records without files, and the index of a running server that writes and removes them."""

    def __init__(self, rule: ResumeRule):
        self.rule = rule
        self.records: dict[str, Record] = {}
        self.index = self.started()

    def started(self) -> DiskIndex:
        """The index of a server that starts now: parents come before children."""
        index = DiskIndex()
        index.add_model(SPACE[0], self.rule, 0.1)
        for record in sorted(self.records.values(), key=lambda record: (record.header.start, record.header.kind)):
            assert index.add(record), f"a {record.header.kind} from {record.header.start} on is of no use"
        index.age()
        return index

    def write(self, kind: str, start: int, words: bytes, key: bytes) -> None:
        header = Header(
            kind=kind,  # type: ignore[arg-type]
            fingerprint=SPACE[0],
            salt=SPACE[1],
            parent=self.index.run_before(SPACE, key[: start * WORD_BYTES]),
            start=start,
            words=words,
            layout={"window_offset": 0},
            s_per_token=0.1,
            rule=self.rule,
        )
        tensor = Tensor("kv", "U8", (100,), 100, 0, 0)
        name = f"{kind} {start} {len(self.records)} {key!r}"
        record = Record(name=name, header=header, tensors=(tensor,), file_bytes=100, used_s=1.0)
        if name not in self.records:
            self.records[name] = record
            assert self.index.add(replace(record))

    def write_path(self, key: bytes, most: int) -> None:
        """Write what is missing of a path, at most so many tokens a record, and its state."""
        end = len(key) // WORD_BYTES
        while (start := self.index.tree.common_length(SPACE, key)) < end:
            stop = min(end, start + most)
            self.write("run", start, key[start * WORD_BYTES : stop * WORD_BYTES], key)
        if self.rule.needs_state and not self.index.has_state(SPACE, key):
            self.write("state", end, b"", key)

    def sweep(self) -> None:
        for record in self.index.unused():
            del self.records[record.name]


def test_a_run_whose_tokens_another_run_holds_is_found_again_with_what_continues_it() -> None:
    disk = Disk(ResumeRule())
    key = pack(range(30))
    disk.write_path(key[: 10 * WORD_BYTES], 10)
    disk.index.tree.trim(SPACE, key[: 10 * WORD_BYTES], 9)
    disk.write_path(key[: 10 * WORD_BYTES], 10)
    disk.write_path(key, 20)
    disk.sweep()
    assert sorted(record.header.start for record in disk.records.values()) == [0, 9, 10]
    assert disk.started().tree.common_length(SPACE, key) == 30


def test_a_run_whose_tokens_another_run_holds_goes_if_nothing_continues_it() -> None:
    disk = Disk(ResumeRule())
    key = pack(range(10))
    disk.write_path(key, 10)
    disk.index.tree.trim(SPACE, key, 9)
    disk.write_path(key, 10)
    disk.index = disk.started()
    disk.index.tree.clear()
    disk.sweep()
    assert not disk.records


def test_files_go_whatever_else_refers_to_them() -> None:
    disk = Disk(ResumeRule(needs_state=True))
    key = pack(range(10))
    disk.write_path(key, 4)
    elsewhere = list(disk.index.tree.store.nodes())
    disk.index.tree.trim(SPACE, key, 0)
    disk.sweep()
    assert elsewhere and not disk.records and not len(disk.index)


def test_the_files_of_a_match_stay_until_it_is_released() -> None:
    disk = Disk(ResumeRule())
    key = pack(range(10))
    disk.write_path(key, 4)
    match = disk.index.tree.match(SPACE, key + key, now=1.0)
    disk.index.tree.detach(salts="")
    disk.sweep()
    assert match.length == 10 and len(disk.records) == 3
    disk.index.tree.release(match)
    disk.sweep()
    assert not disk.records


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(20))
def test_a_restart_finds_what_the_index_holds(rule: ResumeRule, seed: int) -> None:
    rng = random.Random(seed)
    disk = Disk(rule)
    paths = [pack(rng.choices(range(2), k=rng.randrange(1, 24))) for _ in range(8)]
    for _ in range(40):
        key = rng.choice(paths)[: rng.randrange(1, 24) * WORD_BYTES]
        match rng.randrange(6):
            case 0 | 1 | 2:
                disk.write_path(key, rng.randrange(1, 9))
            case 3:
                disk.index.tree.trim(SPACE, key, rng.randrange(0, 24))
            case 4:
                disk.index.tree.thin(SPACE, key, keep_last=1)
            case _:
                disk.index.tree.shrink_to(disk.index.tree.used_bytes * rng.randrange(5, 10) // 10)
        disk.sweep()
        index = disk.started()
        for path in paths:
            held = disk.index.tree.resume_length(SPACE, path)
            assert index.tree.resume_length(SPACE, path) >= held
        if rng.random() < 0.2:
            disk.index = index
            disk.sweep()
