"""Frames are found behind any damage, and nothing else is."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.disk.frames import FRAME_BYTES, SEALED, framed, frames

HERE, ELSEWHERE = b"here", b"elsewhere"
RECORDS = st.lists(st.binary(max_size=40) | st.text().map(str.encode), max_size=6)


def found(content: bytes, identity: bytes = HERE) -> list[bytes]:
    return [frame.data for frame in frames(content, identity)]


@given(RECORDS)
def test_all_are_found_and_only_in_their_own_file(records: list[bytes]) -> None:
    content = b"".join(framed(record, HERE) for record in records)
    assert found(content) == records
    assert found(content, ELSEWHERE) == []
    for frame in frames(content, HERE):
        assert content[frame.start : frame.end] == framed(frame.data, HERE)


@given(RECORDS, st.data())
def test_a_cut_costs_the_record_that_it_hits(records: list[bytes], data: st.DataObject) -> None:
    content = b"".join(framed(record, HERE) for record in records)
    end = data.draw(st.integers(0, len(content)))
    whole = found(content[:end])
    assert whole == records[: len(whole)] and sum(len(record) + FRAME_BYTES for record in whole) <= end
    assert found(content[:end] + framed(b"next", HERE)) == [*whole, b"next"]


@given(RECORDS.filter(bool), st.data())
def test_a_damaged_byte_costs_the_record_that_it_hits(records: list[bytes], data: st.DataObject) -> None:
    content = bytearray(b"".join(framed(record, HERE) for record in records))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    hit, end = 0, 0
    for number, record in enumerate(records):
        end += FRAME_BYTES + len(record)
        if place < end:
            hit = number
            break
    assert found(bytes(content)) == records[:hit] + records[hit + 1 :]


@given(st.binary(max_size=200))
def test_anything_else_is_no_frame(content: bytes) -> None:
    assert found(content) == []


def test_the_form_is_part_of_a_frame() -> None:
    [frame] = frames(framed(b"x", HERE, SEALED), HERE)
    assert frame.form == SEALED
