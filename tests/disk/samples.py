"""Small records with random bytes, which follow from their seeds."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_mlx.cache.index import pack
from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.disk.database import LOCK
from vllm_mlx.disk.files import size_of
from vllm_mlx.disk.folder import Folder
from vllm_mlx.disk.record import Header, Record, TensorData

LAYOUT = {"layers": [{"heads": 2}], "slab": 4}
Specs = list[tuple[str, str, tuple[int, ...]]]
SPECS: Specs = [("keys.0", "BF16", (1, 2, 4, 5)), ("values.0", "BF16", (1, 2, 4, 5)), ("scales.0", "U8", (3,)),
                ("keys.1", "F32", (2, 7)), ("empty", "F16", (0, 4))]  # fmt: skip


def run(start: int = 0, num_tokens: int = 8, *, parent: str = "", seed: int = 0, **fields: Any) -> Header:
    rng = random.Random(seed)
    words = pack([rng.randrange(1 << 17) for _ in range(num_tokens - 1)] + [(1 << 63) + seed])
    values = {"fingerprint": "model", "salt": "", "layout": LAYOUT, "s_per_token": 0.25, "rule": ResumeRule()}
    return Header(kind="run", start=start, parent=parent, words=words, **(values | fields))


def state(start: int, parent: str, **fields: Any) -> Header:
    values = {"fingerprint": "model", "salt": "", "layout": LAYOUT, "s_per_token": 0.25, "rule": ResumeRule()}
    return Header(kind="state", start=start, parent=parent, **(values | fields))


def numbers(seed: int = 0, specs: Specs = SPECS) -> list[TensorData]:
    rng = random.Random(f"numbers {seed}")
    return [
        (name, dtype, shape, memoryview(rng.randbytes(size_of([(name, dtype, shape, memoryview(b""))]))))
        for name, dtype, shape in specs
    ]


def folder(root: Path, **limits: Any) -> Folder:
    return Folder(root, **({"max_bytes": 10**9, "daily_bytes": 10**9, "floor_bytes": 0} | limits))


@contextmanager
def opened(root: Path, **limits: Any) -> Iterator[Folder]:
    """The folder of one server, from its start to its end."""
    place = folder(root, **limits)
    try:
        yield place
    finally:
        place.close()


def read(folder: Folder, record: Record) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """What a record's tensors are on disk."""
    found = []
    for index, tensor in enumerate(record.tensors):
        buffer = bytearray(tensor.nbytes)
        folder.read_into(record, index, memoryview(buffer))
        found.append((tensor.name, tensor.dtype, tensor.shape, bytes(buffer)))
    return found


def expected(seed: int = 0, specs: Specs = SPECS) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [(name, dtype, shape, bytes(data)) for name, dtype, shape, data in numbers(seed, specs)]  # type: ignore[arg-type]


def on_disk(root: Path) -> int:
    """Bytes of all files that count towards the cap."""
    return sum(file.stat().st_size for file in root.rglob("*") if file.is_file() and file.name != LOCK)
