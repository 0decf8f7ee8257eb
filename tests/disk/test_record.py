"""A record becomes a row and comes back; headers make sense, and each changed byte of a row is noticed."""

import pytest

from tests.disk.samples import run, state
from vllm_mlx.disk.faults import Damaged
from vllm_mlx.disk.record import Header, Record, name_of, record_of, row_of, tensors_of


def record(header: Header) -> Record:
    tensors = tensors_of(
        [("keys", "BF16", (2, 3, 4), 5), ("scales", "U8", (3,), 2**64 - 1), ("empty", "F32", (0, 2), 0)]
    )
    return Record(name=name_of(77), header=header, tensors=tensors, file_bytes=51, used_s=5.0)


HEADERS = [run(), run(4, 3000, parent="p", salt='ü"\\'), state(7, "p"), run(salt="\ud800")]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_a_row_gives_the_record_back(header: Header) -> None:
    assert record_of(row_of(record(header))) == record(header)


def test_tensors_follow_each_other() -> None:
    assert [(tensor.offset, tensor.nbytes) for tensor in record(run()).tensors] == [(0, 48), (48, 3), (51, 0)]


def test_each_changed_byte_of_a_row_is_noticed() -> None:
    row = row_of(record(run()))
    for column in (1, 2, 4):
        content = row[column]
        assert isinstance(content, bytes)
        for at in range(len(content)):
            changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
            with pytest.raises(Damaged):
                record_of((*row[:column], changed, *row[column + 1 :]))  # type: ignore[arg-type]
    for values in ((78, *row[1:]), (*row[:1], None, *row[2:]), (*row[:4], None), (*row[:2], "text", *row[3:])):
        with pytest.raises(Damaged):
            record_of(values)  # type: ignore[arg-type]


@pytest.mark.parametrize("used", [None, "text", float("nan"), float("inf"), b"1"])
def test_a_damaged_time_counts_as_long_ago(used: object) -> None:
    row = row_of(record(run()))
    assert record_of((*row[:3], used, row[4])).used_s == 0.0  # type: ignore[arg-type]


def test_a_run_ends_after_its_tokens() -> None:
    assert run(4, 6, parent="a").end == 10 and state(4, "a").end == 4
