"""An encoder on the engine: its vectors, beside replies of a chat model, and in every state of its weights."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.encoders import make_encoder
from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import EngineConfig, ModelConfig
from vllm_mlx.core.errors import Cancelled, InvalidParameter
from vllm_mlx.core.events import Failed, Finished, Vectors
from vllm_mlx.core.request import Request, TextInputs
from vllm_mlx.core.step import PrefillChunk, StepOutput
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.loading import start_engine

from .test_several_models import Serving, prompt_of

CHAT, ENCODER = 0, 1


class Encoding(Serving):
    """Serves a chat model and an encoder."""

    async def encode(self, *texts: str, model: int = ENCODER, tenant: str = "", name: str = "") -> np.ndarray:
        """Return the vectors, one in each row."""
        vectors, usage = await self.encode_all(TextInputs(texts=texts), model=model, tenant=tenant, name=name)
        self.num_tokens = usage.prompt_tokens
        return vectors

    async def encode_all(self, inputs: TextInputs, *, model: int, tenant: str, name: str) -> tuple[np.ndarray, Any]:
        self.num_asked += 1
        request = Request(request_id=name or f"e{self.num_asked}", texts=inputs, model=model, tenant=tenant)
        found: list[Any] = []
        async with await self.client.submit(request) as generation:
            async for _, event in generation:
                if isinstance(event, Failed):
                    raise event.error
                found.append(event)
        [vectors] = [event.vectors for event in found if isinstance(event, Vectors)]
        assert isinstance(found[-1], Finished)
        return np.stack(vectors), found[-1].usage


@contextmanager
def serving(
    folder: Path, *families: str, vocab_size: int = 384, **settings: Any
) -> Iterator[tuple[Encoding, asyncio.Runner]]:
    """Serve a chat model and then an encoder of each family."""
    made = [make_encoder(folder / family, family, vocab_size=vocab_size) for family in families]
    paths = [str(checkpoint("qwen3")), *map(str, made)]
    models = Catalogue(tuple(Entry(config=ModelConfig(model=path), name=path) for path in paths))
    config = EngineConfig(model=paths[0], **({"memory_budget_bytes": 4 << 30} | settings))
    with asyncio.Runner() as runner:
        served = Encoding(start_engine(config, None, models))
        try:
            yield served, runner
        finally:
            runner.run(served.client.shutdown(0))


def texts_of(number: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = "the quick brown fox jumps over a lazy dog while it rains in spring".split()  # noqa: SIM905
    lengths = [min(80, int(rng.lognormvariate(2.5, 0.8)) + 1) for _ in range(number)]
    return [" ".join(rng.choice(words) for _ in range(length)) for length in lengths]


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Return the smallest cosine of two rows of the same number."""
    one, other = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (one, other))
    return float((one * other).sum(axis=-1).min())


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_vector_is_the_same_alone_and_among_others(family: str, tmp_path: Path) -> None:
    with serving(tmp_path, family) as (served, runner):

        async def run() -> None:
            texts = texts_of(40)
            alone = np.concatenate([await served.encode(text) for text in texts])
            together = await served.encode(*texts)
            parts = await asyncio.gather(
                *(served.encode(*texts[at : at + 7], tenant=str(at)) for at in range(0, 40, 7))
            )
            assert cosine(alone, together) > 0.99999
            assert cosine(alone, np.concatenate(parts)) > 0.99999
            assert cosine(alone[:-1], alone[1:]) < 0.999

        runner.run(run())


def test_usage_counts_the_tokens_that_were_read(tmp_path: Path) -> None:
    with serving(tmp_path, "bert") as (served, runner):
        one = runner.run(served.encode("the quick brown fox")), served.num_tokens
        runner.run(served.encode("the quick brown fox", "the quick brown fox"))
        assert served.num_tokens == 2 * one[1] > 0
        [_, row] = runner.run(served.rows())
        assert (row["running"], row["waiting"]) == (0, 0)


class Steps:
    """Notes the order in which replies decode and units run."""

    def __init__(self, engine: LLMEngine):
        self.order: list[str] = []
        for number, name in ((CHAT, "decode"), (ENCODER, "unit")):
            lane = engine.models[number].lane
            assert lane is not None
            self._watch(lane.runner, name)

    def _watch(self, runner: Any, name: str) -> None:
        decode, prefill = runner.decode, runner.prefill

        def watched_decode(plan: Any) -> StepOutput:
            if name == "decode" and plan.decode:
                self.order.append(name)
            return decode(plan)  # type: ignore[no-any-return]

        def watched_prefill(chunks: tuple[PrefillChunk, ...]) -> StepOutput:
            if name == "unit":
                self.order.append(name)
            return prefill(chunks)  # type: ignore[no-any-return]

        runner.decode, runner.prefill = watched_decode, watched_prefill


def test_a_decode_step_lies_between_two_units(tmp_path: Path) -> None:
    with serving(tmp_path, "bert") as (served, runner):

        async def run() -> None:
            prompts = [prompt_of(number, 40) for number in range(2)]
            alone = await asyncio.gather(*(served.ask(CHAT, prompt, 120) for prompt in prompts))
            await served.encode("warm")
            steps = await served.client.ask(Steps)
            asked = [asyncio.create_task(served.ask(CHAT, prompt, 120)) for prompt in prompts]
            while "decode" not in steps.order:
                await asyncio.sleep(0.001)
            await asyncio.gather(*(served.encode(*texts_of(50, seed)) for seed in range(4)))
            assert [reply for reply, _ in await asyncio.gather(*asked)] == [reply for reply, _ in alone]
            beside = steps.order[steps.order.index("decode") : len(steps.order) - steps.order[::-1].index("decode")]
            assert beside.count("unit") > 3
            assert ("unit", "unit") not in pairwise(beside)

        runner.run(run())


def test_a_request_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "bert") as (served, runner):

        async def run() -> None:
            asked = asyncio.create_task(served.encode(*texts_of(2000), name="long"))
            while not served.client.cancel("long"):
                await asyncio.sleep(0.001)
            with pytest.raises(Cancelled):
                await asked
            await served.encode("another")
            [_, row] = await served.rows()
            assert (row["running"], row["waiting"]) == (0, 0)
            assert not await served.client.ask(lambda engine: engine.models[ENCODER].scheduler.has_work)

        runner.run(run())


def test_an_encoder_is_unloaded_and_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path, "bert") as (served, runner):

        async def run() -> None:
            texts = texts_of(20)
            before = await served.encode(*texts)
            await served.client.unload_model(ENCODER, wait=True)
            [_, row] = await served.rows()
            assert (row["state"], row["missing_bytes"]) == ("unloaded", 0)
            assert cosine(before, await served.encode(*texts)) > 0.99999
            [_, row] = await served.rows()
            assert row["state"] == "ready"

        runner.run(run())


def test_an_encoder_without_room_at_the_start_is_measured_at_its_first_load(tmp_path: Path) -> None:
    with serving(tmp_path, "bert", vocab_size=41_000) as (served, runner):
        texts = texts_of(10)
        expected = runner.run(served.encode(*texts))
    tight = {"memory_budget_bytes": 14 << 20, "max_prefill_chunk": 256}
    with serving(tmp_path, "bert", vocab_size=41_000, **tight) as (served, runner):
        assert [row["state"] for row in runner.run(served.rows())] == ["ready", "unloaded"]
        assert cosine(expected, runner.run(served.encode(*texts))) > 0.99999
        assert [row["state"] for row in runner.run(served.rows())] == ["unloaded", "ready"]


def test_an_input_that_is_too_long_is_refused_by_its_number_before_anything_runs(tmp_path: Path) -> None:
    with serving(tmp_path, "bert") as (served, runner):
        with pytest.raises(InvalidParameter, match=r"(?s)1.*\d+ tokens"):
            runner.run(served.encode("short", "long " * 2000))
        assert runner.run(served.encode("short")).shape == (1, 64)
