"""MLX's limits: what is set at start, and what is wired. Residency sets are replayed as MLX's sources describe them."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.rope_utils import initialize_rope

import vllm_mlx
from vllm_mlx.runner import device
from vllm_mlx.runner.device import DeviceMemory
from vllm_mlx.runner.model import weight_arrays

GB = 1 << 30
PAGE = 16384


class RecordedDevice:
    """The calls of `mlx.core` that concern memory, above a model of one residency set.

    It follows mlx/backend/metal/allocator.cpp and resident.cpp: buffers above a page are rounded to pages, tiny ones
    lie in a heap, and a buffer enters the set if it fits below the wired limit.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.active = 0
        self.limit = 0
        self.changes = 0  # allocations that entered or left the set
        self._buffers: dict[int, int] = {0: 1 << 20}  # number → bytes in the set's terms; 0 is the heap
        self._lengths: dict[int, int] = {}
        self._resident: set[int] = set()

    def allocate(self, size: int) -> int:
        number = len(self._lengths) + 1
        length = -(-size // PAGE) * PAGE if size > PAGE else size
        self._lengths[number] = length
        self.active += length
        if size >= 256:
            self._buffers[number] = -(-size // PAGE) * PAGE
            self._insert(number)
        return number

    def free(self, number: int) -> None:
        self.active -= self._lengths[number]
        self._buffers.pop(number, None)
        if number in self._resident:
            self._resident.remove(number)
            self.changes += 1

    def _insert(self, number: int) -> None:
        if self.resident_bytes + self._buffers[number] <= self.limit:
            self._resident.add(number)
            self.changes += 1

    @property
    def resident_bytes(self) -> int:
        return sum(self._buffers[number] for number in self._resident)

    def set_wired_limit(self, limit: int) -> None:
        self.calls.append("set_wired_limit")
        self.limit = limit
        for number in reversed(self._buffers):
            self._insert(number)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("set_memory_limit", "set_cache_limit"):
            monkeypatch.setattr(mx, name, lambda _, name=name: self.calls.append(name))
        monkeypatch.setattr(mx, "set_wired_limit", self.set_wired_limit)
        monkeypatch.setattr(mx, "get_active_memory", lambda: self.active)
        monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 16 * GB})


class Weight:
    def __init__(self, nbytes: int):
        self.nbytes = nbytes


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedDevice:
    recorded = RecordedDevice()
    recorded.install(monkeypatch)
    return recorded


def test_no_wired_limit_is_set_before_load(recorded: RecordedDevice) -> None:
    device.apply_limits(8 * GB)
    assert recorded.calls == ["set_memory_limit", "set_cache_limit"]


def test_one_function_wires_memory() -> None:
    sources = Path(vllm_mlx.__file__).parent.rglob("*.py")
    found = {file.name: file.read_text(encoding="utf-8").count("set_wired_limit(") for file in sources}
    assert {name: number for name, number in found.items() if number} == {"device.py": 1}


WEIGHTS = [50 << 20, 3 << 20, 5 * 8192 + 4, 20000, 16384, 4096, 1024, 200, 4] * 30


def test_the_weights_are_wired_and_nothing_enters_or_leaves_after_load(recorded: RecordedDevice) -> None:
    assert traffic(recorded, lambda: device.wire_weights(map(Weight, WEIGHTS), DeviceMemory(32 * GB, 16 * GB))) == 0
    assert recorded.resident_bytes == recorded.limit, "the weights fill the set"


def test_hidden_constants_are_among_the_weights(recorded: RecordedDevice) -> None:
    """Each takes a page, which MLX counts by its length: a limit that is too short leaves a large buffer out."""
    rope = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    model = nn.Module()
    model.layers = [nn.Linear(512, 512, bias=False) for _ in range(8)]
    for layer in model.layers:
        layer.rope = initialize_rope(128, 5e5, False, {**rope, "original_max_position_embeddings": 8192}, 131072)
    weights = weight_arrays(model)
    assert sorted(weight.nbytes for weight in weights) == [256] * 8 + [1 << 20] * 8
    for weight in weights:
        recorded.allocate(weight.nbytes)
    device.wire_weights(weights, DeviceMemory(32 * GB, 16 * GB))
    assert recorded.resident_bytes == recorded.limit


def test_a_limit_of_all_memory_lets_every_buffer_in_and_out(recorded: RecordedDevice) -> None:
    assert traffic(recorded, lambda: recorded.set_wired_limit(14 * GB)) > 100


def traffic(recorded: RecordedDevice, wire: Callable[[], object]) -> int:
    """Load weights, wire, then serve: rows and temporaries of many sizes come and go. Returns the set's changes."""
    for size in WEIGHTS:
        recorded.allocate(size)
    wire()
    before = recorded.changes
    live: list[int] = []
    for step in range(200):
        live += [recorded.allocate(size) for size in (4, 300, 5000, 40_000, 700_000, (step % 7 + 1) << 20)]
        while len(live) > 60:
            recorded.free(live.pop(step % 50))
    return recorded.changes - before


@pytest.mark.parametrize(
    ("machine", "weights", "reason"),
    [
        (DeviceMemory(16 * GB, 12 * GB), 9 * GB, "stay free for the system"),
        (DeviceMemory(32 * GB, 24 * GB), 22 * GB, "are wired, and"),
        (DeviceMemory(64 * GB, 20 * GB), 21 * GB, "Metal recommends"),
        (DeviceMemory(64 * GB, None), 1 * GB, "no Metal device"),
    ],
)
def test_weights_that_leave_too_little_are_not_wired(
    recorded: RecordedDevice, machine: DeviceMemory, weights: int, reason: str
) -> None:
    recorded.allocate(weights)
    found = device.wire_weights([Weight(weights)], machine)  # type: ignore[list-item]
    assert found is not None and reason in found
    assert recorded.calls == []


def test_a_gpu_with_memory_of_its_own_is_not_given_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 80 * GB})
    found = device.device_memory()
    assert (found.total_bytes, found.recommended_bytes) == (80 * GB, 80 * GB)
    assert found.default_budget_bytes == 72 * GB and found.process_limit_bytes(GB) <= 80 * GB
