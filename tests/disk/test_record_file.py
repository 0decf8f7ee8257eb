"""A record's file is a safetensors file. Others read the same bytes from it, and no damage goes unnoticed."""

import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save

from tests.disk.samples import SPECS, expected, numbers, run, state
from tests.support.drawing import examples
from vllm_mlx.disk.record import Damaged, Record, UnknownVersion
from vllm_mlx.disk.record_file import Draft, Source, read_record, read_tensor

Cut = Callable[[bytes], list[memoryview]]


def written(path: Path, header=None, tensors=None) -> Record:
    draft = Draft(header or run(), numbers() if tensors is None else tensors)
    with path.open("xb", buffering=0) as file:
        record = draft.write(file.fileno())
    assert path.stat().st_size == draft.file_bytes == record.file_bytes
    return record


def read(path: Path, name: str) -> tuple[Record, list[tuple]]:
    with path.open("rb") as file:
        source = Source(file.fileno(), path.stat().st_size)
        record = read_record(source, name)
        found = []
        for index, tensor in enumerate(record.tensors):
            buffer = bytearray(tensor.nbytes)
            read_tensor(source, record, index, memoryview(buffer))
            found.append((tensor.name, tensor.dtype, tensor.shape, bytes(buffer)))
        return record, found


@pytest.mark.parametrize("header", [run(), run(4, 3000, parent="p", salt='ü"\\'), state(7, "p")], ids=lambda h: h.kind)
def test_what_is_written_is_read(tmp_path, header):
    record = written(tmp_path / "a", header)
    found, tensors = read(tmp_path / "a", record.name)
    assert found == record and found.header == header
    assert tensors == expected()


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_tensors_may_come_in_pieces(tmp_path, size):
    cut = [(name, dtype, shape, iter([data[at : at + size] for at in range(0, len(data), size)]))
           for name, dtype, shape, data in numbers()]  # fmt: skip
    record = written(tmp_path / "a", tensors=cut)
    assert read(tmp_path / "a", record.name)[1] == expected()


def test_a_record_may_lie_inside_of_a_file(tmp_path):
    with (tmp_path / "a").open("wb+", buffering=0) as file:
        file.write(b"before")
        record = Draft(run(), numbers()).write(file.fileno())
        assert file.tell() == 6 + record.file_bytes
        file.write(b"after")
        source = Source(file.fileno(), record.file_bytes, 6)
        assert read_record(source, record.name) == record


def test_numbers_of_other_shapes_in_memory_are_written_in_order(tmp_path):
    keys = memoryview(bytes(range(48))).cast("H", (2, 3, 4))
    record = written(tmp_path / "a", tensors=[("keys", "BF16", (2, 3, 4), keys)])
    assert read(tmp_path / "a", record.name)[1] == [("keys", "BF16", (2, 3, 4), bytes(range(48)))]


def test_safetensors_reads_the_same_bytes(tmp_path):
    record = written(tmp_path / "a.safetensors")
    found = dict(safetensors.deserialize((tmp_path / "a.safetensors").read_bytes()))
    for name, dtype, shape, data in expected():
        assert (found[name]["dtype"], tuple(found[name]["shape"]), bytes(found[name]["data"])) == (dtype, shape, data)
    words = struct.unpack("<8Q", bytes(found["words"]["data"]))
    assert struct.pack(">8Q", *words) == run().words
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="mlx") as file:
        metadata = file.metadata()
    assert json.loads(metadata["record"])["layout"] == run().layout and metadata["digest"] == record.digest


def test_mlx_reads_the_same_numbers(tmp_path):
    specs = [spec for spec in SPECS if spec[0] != "empty"]
    written(tmp_path / "a.safetensors", tensors=numbers(specs=specs))
    found = mx.load(str(tmp_path / "a.safetensors"))
    for name, _, shape, data in numbers(specs=specs):
        assert found[name].shape == shape and bytes(memoryview(found[name].view(mx.uint8))) == bytes(data)
    assert found["words"].tolist() == list(struct.unpack(">8Q", run().words))


def test_numbers_are_aligned(tmp_path):
    record = written(tmp_path / "a", run(num_tokens=3), numbers(specs=[("a", "U8", (3,)), *SPECS]))
    assert all(tensor.offset % 8 == 0 for tensor in record.tensors)
    assert record.file_bytes % 8 == 0


def test_the_start_reads_little(tmp_path):
    """One read of 64 KB is enough for the header and the tokens of a run of 4,096."""
    specs = [(f"{kind}.{slab}", "BF16", (1, 2, 1, 8)) for slab in range(16) for kind in ("keys", "values")]
    record = written(tmp_path / "a", run(num_tokens=4096), numbers(specs=specs))
    assert record.tensors[0].offset < 64 << 10


def test_a_file_that_is_cut_is_damaged(tmp_path):
    record = written(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    for size in (0, 1, 7, 8, 9, 100, record.tensors[0].offset, *range(len(content) - 70, len(content))):
        (tmp_path / "b").write_bytes(content[:size])
        with pytest.raises(Damaged):
            read(tmp_path / "b", record.name)
    for more in (b"\0", content):
        (tmp_path / "b").write_bytes(content + more)
        with pytest.raises(Damaged):
            read(tmp_path / "b", record.name)


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_noticed_before_a_wrong_byte_is_served(tmp_path, seed):
    """Only bits of the padding between tensors may differ."""
    record = written(tmp_path / "a")
    content, rng = bytearray((tmp_path / "a").read_bytes()), random.Random(seed)
    served = 0
    for _ in range(examples(150)):
        at, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
        content[at] ^= bit
        (tmp_path / "b").write_bytes(content)
        content[at] ^= bit
        try:
            found, tensors = read(tmp_path / "b", record.name)
        except Damaged:
            continue
        served += 1
        assert found == record and tensors == expected()
    assert served < examples(15)


def test_every_bit_of_the_header_counts(tmp_path):
    record = written(tmp_path / "a")
    content, noticed = bytearray((tmp_path / "a").read_bytes()), 0
    for at in range(record.tensors[0].offset):
        content[at] ^= 1 << at % 8
        (tmp_path / "b").write_bytes(content)
        content[at] ^= 1 << at % 8
        try:
            assert read(tmp_path / "b", record.name) == (record, expected())
        except Damaged:
            noticed += 1
    assert noticed > record.tensors[0].offset - 8  # up to seven bytes align the first tensor


def test_tensors_that_changed_places_are_damaged(tmp_path):
    record = written(tmp_path / "a")
    content = bytearray((tmp_path / "a").read_bytes())
    (first, second), size = record.tensors[:2], record.tensors[0].nbytes
    one, other = (content[tensor.offset : tensor.offset + size] for tensor in (first, second))
    content[first.offset : first.offset + size], content[second.offset : second.offset + size] = other, one
    (tmp_path / "b").write_bytes(content)
    with pytest.raises(Damaged):
        read(tmp_path / "b", record.name)


def test_a_tensor_of_another_writing_is_damaged(tmp_path):
    """The same tokens, written twice: a file is never a mixture of the two."""
    one, other = written(tmp_path / "a"), written(tmp_path / "b", tensors=numbers(1))
    assert one.name == other.name and one.digest != other.digest
    content, place = bytearray((tmp_path / "a").read_bytes()), one.tensors[1].offset
    content[place:] = (tmp_path / "b").read_bytes()[place:]
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(Damaged):
        read(tmp_path / "c", one.name)


def test_a_record_under_another_name_is_damaged(tmp_path):
    written(tmp_path / "a")
    other = written(tmp_path / "b", run(seed=1))
    with pytest.raises(Damaged):
        read(tmp_path / "a", other.name)


def foreign() -> bytes:
    return save({"a": np.zeros(8, np.uint8)}, {"format": "pt"})


@pytest.mark.parametrize(
    "content",
    [b"", bytes(8), bytes(10_000), b"\xff" * 10_000, b"PK\3\4" * 99, struct.pack("<Q", 2) + b"{}", foreign()],
    ids=["empty", "short", "zeros", "ones", "archive", "no header", "foreign"],
)
def test_other_files_are_damaged_records(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(Damaged):
        read(tmp_path / "a", written(tmp_path / "b").name)


def test_an_unknown_version_is_told_from_damage(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("vllm_mlx.disk.record_file.VERSION", "8")
        record = written(tmp_path / "a")
    with pytest.raises(UnknownVersion):
        read(tmp_path / "a", record.name)
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "b").write_bytes(content.replace(b'"version":"8"', b'"version":"9"'))
    with pytest.raises(Damaged):
        read(tmp_path / "b", record.name)


def test_without_preadv_the_same_bytes_are_read(tmp_path, monkeypatch):
    record = written(tmp_path / "a")
    monkeypatch.delattr(os, "preadv")
    assert read(tmp_path / "a", record.name)[1] == expected()


def test_a_draft_whose_bytes_do_not_fit_its_shapes_is_a_bug(tmp_path):
    [(name, dtype, shape, data), *_] = numbers()
    with pytest.raises(AssertionError):
        written(tmp_path / "a", tensors=[(name, dtype, shape, data[:-1])])
    with pytest.raises(AssertionError):
        Draft(replace(run()), [])
