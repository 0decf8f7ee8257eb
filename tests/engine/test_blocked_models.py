"""A model that cannot have room while a pinned one is busy delays no model that can, and nobody leaves for it."""

import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import Driver, plain_loop
from tests.support.rows import cases
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.loading import Source, load_engines
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.scheduler.residence import Resident

PINNED, LARGE, SMALL = range(3)
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"hidden_size": 192, "intermediate_size": 384}),
    ("llama", {}),
]
BUDGET = 13_500_000  # beside the pinned model with a long row: room for the small model, and none for the large one
PATHS = [checkpoint(name, **options) for name, options in MODELS]
LONG, SHORT, NUM_TOKENS = 1000, 20, 6


def prompt_of(number: int, length: int) -> list[int]:
    return [7 + (number * 31 + 5 * place * place + 3 * place) % 180 for place in range(length)]


def alone(model: int, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    return plain_loop(PATHS[model], prompt, num_tokens)[0]


class Three(Driver):
    """An engine of three models on the test's own thread."""

    def __init__(self) -> None:
        config = EngineConfig(
            model=str(PATHS[0]), memory_budget_bytes=BUDGET, max_prefill_chunk=64, max_model_len=1400, max_num_seqs=2
        )
        sources = [
            Source(name=f"{at}", config=replace(config, model=str(path)), checkpoint=find_checkpoint(str(path)),
                   pin=at == PINNED)
            for at, path in enumerate(PATHS)
        ]  # fmt: skip
        self.engine: LLMEngine = load_engines(sources)
        self.replies, self.seqs = {}, {}
        for model in self.engine.residency.models:
            model.expected_load_s = 0.0  # so that no sequence is patient for long

    def step(self) -> None:
        if self.engine.has_work:
            self.engine.step(self.deliver)
        self.engine.move(self.deliver)

    def run(self) -> None:
        while self.engine.is_busy or any(model.waiting for model in self.engine.residency.models):
            self.step()

    def load(self, model: int) -> None:
        self.engine.ask(lambda engine: engine.load(engine.models[model]), self.deliver)
        while self.state(model) == "loading":
            self.step()

    def unload(self, model: int) -> None:
        self.engine.ask(lambda engine: engine.unload(engine.models[model]), self.deliver)
        while self.state(model) != "unloaded":
            self.step()

    def state(self, model: int) -> str:
        return self.engine.models[model].residence.state

    def is_done(self, seq_id: int) -> bool:
        assert self.replies[seq_id].error is None
        return self.replies[seq_id].finish_reason is not None


def free_bytes(engine: LLMEngine, lane: Resident, gone: set[Resident]) -> int:
    """What `lane` would have once the models of `gone` had left."""
    facts = [other.memory for other in engine.residency.models]
    taken = sum(memory.media_bytes + memory.grammars_bytes for memory in facts)
    for other in set(engine.residency.models) - gone - {lane}:
        room = other.scheduler.room
        taken += other.taken_bytes + room.rows_bytes(extra=1) + room.growth_bytes
    return BUDGET - taken - max(memory.transient_bytes for memory in facts)


def needed_bytes(lane: Resident) -> int:
    row_bytes = lane.scheduler.room.coming_bytes(lane.first)
    return lane.weights_bytes + max(row_bytes, lane.room_bytes)


def is_blocked(engine: LLMEngine, lane: Resident) -> bool:
    pinned = engine.residency.models[PINNED]
    others = {other for other in engine.residency.models if not other.is_pinned}
    return lane is not pinned and pinned.is_busy and needed_bytes(lane) > free_bytes(engine, lane, others)


@pytest.mark.parametrize("small_is", cases(["unloaded", "idle", "busy", "loaded by command"], ["unloaded", "busy"]))
def test_a_small_model_runs_while_a_large_one_waits_for_a_pinned_one(small_is: str) -> None:
    """The large one has waited long, so that models that could help it would leave."""
    three = Three()
    engine, large = three.engine, three.engine.residency.models[LARGE]
    for model in (LARGE, SMALL):
        if three.state(model) == "ready":
            three.unload(model)
    if small_is in ("idle", "busy"):
        three.load(SMALL)
    pinned = three.add(prompt_of(1, LONG), 390, model=PINNED)
    earlier = [three.add(prompt_of(2, SHORT), 60, model=SMALL)] if small_is == "busy" else []
    while not all(three.replies[seq_id].token_ids for seq_id in (pinned, *earlier)):
        three.step()
    waits = three.add(prompt_of(3, SHORT), NUM_TOKENS, model=LARGE)
    assert is_blocked(engine, large) and large.patience_s <= 0.1
    three.step()
    time.sleep(0.12)
    if small_is == "loaded by command":
        three.load(SMALL)
    for _ in range(4):
        three.step()
        assert three.state(SMALL) == ("unloaded" if small_is == "unloaded" else "ready")
    begun = Counter(engine.residency.models[SMALL].loads)
    fits = three.add(prompt_of(4, SHORT), NUM_TOKENS, model=SMALL)
    while not three.is_done(fits):
        three.step()
        assert not three.is_done(pinned) and three.state(LARGE) == "unloaded"
        assert small_is == "unloaded" or three.state(SMALL) == "ready"
    assert engine.residency.models[SMALL].loads - begun == Counter(request=small_is == "unloaded")
    three.run()
    asked = {pinned: (PINNED, prompt_of(1, LONG), 390), waits: (LARGE, prompt_of(3, SHORT), NUM_TOKENS),
             fits: (SMALL, prompt_of(4, SHORT), NUM_TOKENS)}  # fmt: skip
    for seq_id, request in asked.items():
        assert three.is_done(seq_id) and three.replies[seq_id].token_ids == alone(*request)


def test_who_could_have_room_is_still_overtaken_by_nobody() -> None:
    """The pinned model is busy with a short row: the large one has room once the small one has left."""
    three = Three()
    three.unload(LARGE)
    three.load(SMALL)
    three.add(prompt_of(1, SHORT), 300, model=PINNED)
    three.step()
    large = three.add(prompt_of(2, SHORT), NUM_TOKENS, model=LARGE)
    assert three.state(LARGE) == "unloaded" and not is_blocked(three.engine, three.engine.residency.models[LARGE])
    while three.state(SMALL) != "unloaded":
        three.step()
    small = three.add(prompt_of(3, SHORT), NUM_TOKENS, model=SMALL)
    while three.state(LARGE) != "ready":
        assert three.state(SMALL) == "unloaded"
        three.step()
    three.run()
    assert three.is_done(large) and three.replies[small].token_ids == alone(SMALL, prompt_of(3, SHORT))


@dataclass
class Rules:
    """Looks at each move of weights, and counts the moves in which a rule had something to say."""

    three: Three
    num_passed: int = 0  # times that a model was loaded past one that could not have room
    num_stayed: int = 0  # moves in which nobody left for such a model

    def step(self) -> None:
        engine = self.three.engine
        if engine.has_work:
            engine.step(self.three.deliver)
        lanes, now = engine.residency.models, time.monotonic()
        wanting = sorted((lane for lane in lanes if lane.wants_weights(now)), key=lambda lane: lane.first.seq_id)
        is_loading = any(lane.state == "loading" for lane in lanes)
        blocked = [lane for lane in wanting if is_blocked(engine, lane)]
        able = [lane for lane in wanting if lane not in blocked]
        short = any(lane.is_short and lane.is_in_memory for lane in lanes)
        may_load = None
        if able and not is_loading and not short and needed_bytes(able[0]) <= free_bytes(engine, able[0], set()):
            may_load = able[0]
        stays = bool(blocked) and not able and not short and not any(lane.is_outgrown for lane in lanes)
        ready = [lane for lane in lanes if lane.state == "ready"]
        engine.move(self.three.deliver)
        if may_load is not None:
            assert may_load.state == "loading"
            self.num_passed += bool(blocked) and blocked[0].first.seq_id < may_load.first.seq_id
        if stays:
            assert all(lane.state == "ready" for lane in ready)
            self.num_stayed += 1


@pytest.mark.parametrize("num_requests", [20, pytest.param(500, marks=pytest.mark.full)])
def test_nothing_waits_for_a_model_that_could_not_run_anyway(num_requests: int) -> None:
    """Requests come in bursts, and now and then a command unloads a model."""
    drawn = random.Random(4)
    three = Three()
    rules, asked = Rules(three), {}
    while len(asked) < num_requests:
        model = drawn.choice((PINNED, LARGE, SMALL))
        length, num_tokens = (drawn.choice((SHORT, LONG, LONG)), 40) if model == PINNED else (SHORT, NUM_TOKENS)
        request = (model, prompt_of(drawn.randrange(4), length), num_tokens)
        asked[three.add(request[1], num_tokens, model=model)] = request
        for _ in range(drawn.choice((0, 1, 5, 60))):
            rules.step()
        unused = [model for model in three.engine.models[LARGE:] if not model.residence.is_busy]
        if unused and drawn.random() < 0.5:
            three.engine.unload(drawn.choice(unused))
    while three.engine.is_busy or any(model.waiting for model in three.engine.residency.models):
        rules.step()
    for seq_id, request in asked.items():
        assert three.is_done(seq_id) and three.replies[seq_id].token_ids == alone(*request)
    assert rules.num_stayed and (rules.num_passed or num_requests < 500)
