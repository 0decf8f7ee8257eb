"""What is told to MLX at start, and what must never be."""

from pathlib import Path

import mlx.core as mx
import pytest

import vllm_mlx
from vllm_mlx.runner import device


def test_no_wired_limit_is_set_on_a_metal_device(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 16 << 30})
    for name in ("set_wired_limit", "set_memory_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, name, lambda _, name=name: told.append(name))
    device.apply_limits(8 << 30)
    assert told == ["set_memory_limit", "set_cache_limit"]


def test_no_module_wires_memory() -> None:
    sources = Path(vllm_mlx.__file__).parent.rglob("*.py")
    assert [str(file) for file in sources if "set_wired_limit(" in file.read_text(encoding="utf-8")] == []
