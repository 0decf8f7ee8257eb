"""What is removed from disk costs the engine thread a few nodes between two steps, counted, however much it is."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_mlx.cache.index import WORD_BYTES, pack
from vllm_mlx.cache.node import Node, ResumeRule
from vllm_mlx.cache.victims import worth
from vllm_mlx.disk.index import DiskIndex
from vllm_mlx.disk.record import Header, Record
from vllm_mlx.disk.removal import PIECES, Removal

NUM_RECORDS = 1000
FILE_BYTES = 1000
RULE = ResumeRule()


@dataclass
class Files:
    """The folder's files, by name."""

    names: set[str] = field(default_factory=set)

    def remove(self, records: list[Record]) -> None:
        self.names.difference_update(record.name for record in records)

    def shorten(self) -> None:
        assert not hasattr(self, "is_short")


def record(number: int, salt: str = "") -> Record:
    header = Header(
        kind="run", fingerprint="model", salt=salt, parent="", start=0, words=pack([number, *range(40)]),
        layout={}, s_per_token=1.0, rule=RULE,
    )  # fmt: skip
    return Record(name=f"{number}", header=header, tensors=(), file_bytes=FILE_BYTES, used_s=float(number))


class Tier:
    """An index of many records."""

    def __init__(self, num_records: int = NUM_RECORDS, salts: tuple[str, ...] = ("",)):
        self.files, self.index, self.weighed = Files(), DiskIndex(), 0
        self.index.add_model("model", RULE, 1.0)
        self.index.tree._worth = self._weigh
        self.removal = Removal(self.files, self.index, lambda work: work())  # type: ignore[arg-type]
        self.records = [record(number, salts[number % len(salts)]) for number in range(num_records)]
        for one in self.records:
            assert self.index.add(one)
            self.files.names.add(one.name)

    def _weigh(self, node: Node, prices: Any) -> float:
        self.weighed += 1
        return worth(node, prices)

    def work(self) -> Iterator[tuple[int, int]]:
        """How many nodes were weighed and how many files were removed in each piece of work."""
        while self.removal.is_busy:
            weighed, held = self.weighed, len(self.files.names)
            self.removal.advance()
            yield self.weighed - weighed, held - len(self.files.names)


def test_room_is_made_in_small_pieces_by_what_is_least_worth() -> None:
    tier, answers = Tier(), []
    tier.removal.make_room(50 * FILE_BYTES, answers.append)
    assert len(tier.files.names) == NUM_RECORDS and not answers, "nothing is done before the next step"
    pieces = list(tier.work())
    assert answers == [True]
    assert max(weighed for weighed, _ in pieces) <= 2 * PIECES and max(removed for _, removed in pieces) <= PIECES
    assert tier.files.names == {one.name for one in tier.records[50:]}, "the ones that were used longest ago went"


def test_room_that_cannot_be_made_is_said() -> None:
    tier, answers = Tier(0), []
    tier.removal.make_room(1, answers.append)
    list(tier.work())
    assert answers == [False]


def test_what_is_added_and_cleared_while_room_is_made_is_respected() -> None:
    tier, answers = Tier(300, salts=("ann", "ben")), []
    tier.removal.make_room(100 * FILE_BYTES, answers.append)
    tier.removal.advance()
    tier.removal.clear("ann")
    late = record(301, "ben")
    assert tier.index.add(late)
    tier.files.names.add(late.name)
    list(tier.work())
    tier.index.tree.check_integrity()
    assert answers == [True] and late.name in tier.files.names
    assert {one.header.salt for one in tier.records if one.name in tier.files.names} <= {"ben"}


def test_what_is_cleared_is_not_found_from_then_on_and_its_files_go_in_small_pieces() -> None:
    tier = Tier(salts=("ann", "ben"))
    tier.removal.clear("ann")
    for one in tier.records[:20]:
        found = tier.index.tree.common_length(("model", one.header.salt), one.header.words)
        assert found == (0 if one.header.salt == "ann" else len(one.header.words) // WORD_BYTES)
    tier.index.tree.check_integrity()
    assert max(removed for _, removed in tier.work()) <= PIECES
    assert tier.files.names == {one.name for one in tier.records if one.header.salt == "ben"}
    assert len(tier.index) == len(tier.files.names)
