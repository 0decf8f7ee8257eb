"""A model is measured once, at its first load, and a start reads nothing but headers of what has no room."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import plain_loop
from tests.support.rows import cases
from tests.support.unloading import FIRST
from tests.support.unloading import serving as serving_one
from vllm_mlx.core.errors import ContextLengthExceeded
from vllm_mlx.engine import loading, sizing
from vllm_mlx.runner import mtp

from .test_several_models import HEADED, NUM_TOKENS, prompt_of, serving

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


@pytest.mark.parametrize("kind", cases(["text", "vision", "head"], ["vision"]))
def test_a_reload_measures_nothing(kind: str, calls: Counter[str]) -> None:
    is_vision = kind == "vision"
    path = checkpoint("vision:qwen3_5" if is_vision else "qwen3_5", **({"mtp": True} if kind == "head" else {}))
    images, heads = int(is_vision), int(kind == "head")
    with serving_one(path) as served:
        loaded = calls.copy()
        assert loaded["calibrate"] == loaded["prove_rows"] == loaded["warm_up"] == 1
        assert loaded["check_family"] == loaded["calibrate_images"] == images and loaded["try_head"] == heads
        reply, _ = served.ask(FIRST)
        served.unload()
        assert served.ask(FIRST)[0] == reply
        assert calls == loaded


TIGHT = {"max_prefill_chunk": 64, "max_model_len": 256}


@pytest.mark.parametrize(
    ("names", "budget_bytes"),
    [
        pytest.param(("qwen3", "deepseek_v41"), 3_750_000, id="layers that are copied whole", marks=pytest.mark.full),
        pytest.param(("qwen3", "qwen3_5", HEADED), 4_700_000, id="an MTP head"),
        pytest.param(
            ("qwen3", "qwen3_5", "llama", "gpt_oss", "vision:qwen3_vl"),
            9_000_000,
            id="a vision encoder",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_model_without_room_is_measured_when_it_is_asked_for(
    names: tuple[str, ...], budget_bytes: int, calls: Counter[str]
) -> None:
    last = len(names) - 1
    with serving(*names, memory_budget_bytes=budget_bytes, **TIGHT) as (served, runner):
        rows = runner.run(served.rows())
        assert [(row["state"], row["loads"]["start"]) for row in rows] == [("ready", 1)] * last + [("unloaded", 0)]
        assert calls["calibrate"] == calls["prove_rows"] == calls["warm_up"] == last and not calls["try_head"]
        asked = [(model, prompt_of(2, 200)) for model in (*range(len(names)), *range(len(names)))]
        replies = [runner.run(served.ask(*each))[0] for each in asked]
        assert replies[: len(names)] == replies[len(names) :], "it comes back as it was"
        assert replies[0] == plain_loop(checkpoint("qwen3"), prompt_of(2, 200), NUM_TOKENS)[0]
        assert calls["calibrate"] == calls["prove_rows"] == calls["warm_up"] == len(names)
        assert calls["try_head"] == (names[last] == HEADED)
        facts = served.client.fronts[last].model_facts
        assert facts["prefill_tokens_per_s_at_load"] != 1000.0
        assert runner.run(served.rows())[last]["loads"]["request"] >= 1


def test_a_prompt_that_the_first_load_finds_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk takes more than assumed, so that less context fits; the model serves what fits."""
    calibrate, count = sizing.calibrate, Counter[str]()

    def dear(model: Any, **options: Any) -> Any:
        count["loads"] += 1
        found = calibrate(model, **options)
        return found if count["loads"] < 2 else sizing.replace(found, chunk_bytes_per_token=12_000.0)

    monkeypatch.setattr(sizing, "calibrate", dear)
    tight = {"memory_budget_bytes": 3_850_000, "max_prefill_chunk": 64}
    with serving("qwen3", "qwen3_5", max_model_len=None, **tight) as (served, runner):
        before = served.client.fronts[1].info.max_model_len

        async def ask_both() -> list[Any]:
            asked = (served.ask(1, prompt_of(1, length), 2) for length in (before - 3, 20))
            return await asyncio.gather(*asked, return_exceptions=True)

        refused, answered = runner.run(ask_both())
        after = served.client.fronts[1].info.max_model_len
        assert after < before and isinstance(refused, ContextLengthExceeded) and f"{after} tokens" in refused.message
        assert answered[0] == plain_loop(checkpoint("qwen3_5"), prompt_of(1, 20), 2)[0]


def test_state_of_a_model_that_a_request_has_loaded_is_found_after_a_restart(tmp_path: Path) -> None:
    for start in range(2):
        tight = {"memory_budget_bytes": 4_700_000, **TIGHT}
        with serving("qwen3", "qwen3_5", "llama", folder=tmp_path, **tight) as (served, runner):
            assert runner.run(served.rows())[2]["loads"]["start"] == 0
            prompt = [*prompt_of(1, 200), *range(11, 11 + 3 * start)]
            reply, num_cached = runner.run(served.ask(2, prompt))
            assert reply == plain_loop(checkpoint("llama"), prompt, NUM_TOKENS)[0]
            assert num_cached >= 190 * start
