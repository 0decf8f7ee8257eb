"""What a first load measures serves reloads, and is kept for the next start."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.mtp_heads import head_tensors, write_split
from tests.support.rows import cases
from tests.support.unloading import FIRST, serving
from vllm_mlx.engine import loading, sizing
from vllm_mlx.runner import mtp

MEASURING: dict[Any, tuple[str, ...]] = {
    mtp: ("try_head",),
    sizing: ("calibrate", "prove_rows", "check_family", "calibrate_images"),
    loading: ("warm_up",),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts what measures and proves; all of it still works."""
    counted: Counter[str] = Counter()

    def counting(name: str, works: Any) -> Any:
        def call(*args: Any, **fields: Any) -> Any:
            counted[name] += 1
            return works(*args, **fields)

        return call

    for module, names in MEASURING.items():
        for name in names:
            monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    yield counted


@pytest.mark.parametrize("kind", cases(["text", "vision", "head"], ["vision", "head"]))
def test_a_reload_measures_nothing_and_a_second_start_proves_nothing(
    kind: str, calls: Counter[str], tmp_path: Path
) -> None:
    is_vision = kind == "vision"
    path = checkpoint("vision:qwen3_5" if is_vision else "qwen3_5", **({"mtp": True} if kind == "head" else {}))
    images, heads = int(is_vision), int(kind == "head")
    with serving(path, tmp_path / "cache") as served:
        first = served.client.model_facts
        loaded = calls.copy()
        assert loaded["calibrate"] == loaded["prove_rows"] == loaded["warm_up"] == 1
        assert loaded["check_family"] == loaded["calibrate_images"] == images and loaded["try_head"] == heads
        reply, _ = served.ask(FIRST)
        served.unload()
        assert served.ask(FIRST)[0] == reply
        assert calls == loaded
    calls.clear()
    with serving(path, tmp_path / "cache") as served:
        assert calls == {"calibrate": 1, "warm_up": 1}, "the speed is that of this start"
        assert served.ask(FIRST)[0] == reply
        second = served.client.model_facts
    measured = ("prefill_tokens_per_s_at_load", "created", "weights_bytes")  # a proof leaves a constant in the model
    assert {**first, **dict.fromkeys(measured)} == {**second, **dict.fromkeys(measured)}


def test_another_checkpoint_in_the_same_folder_is_measured(calls: Counter[str], tmp_path: Path) -> None:
    for architecture in ("qwen3", "qwen3_5"):
        with serving(checkpoint(architecture), tmp_path):
            pass
    assert calls["prove_rows"] == 2


def test_another_head_in_the_same_folder_is_tried(calls: Counter[str], tmp_path: Path) -> None:
    path = checkpoint("vision:qwen3_5")
    config = json.loads((path / "config.json").read_text())
    for seed in (1, 2):
        shutil.rmtree(tmp_path / "head", ignore_errors=True)
        head = write_split(tmp_path / "head", config, head_tensors(config["text_config"], seed))
        with serving(path, tmp_path / "cache", draft_model=str(head)):
            pass
    assert calls["try_head"] == calls["prove_rows"] == 2
