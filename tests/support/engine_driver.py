"""Drives an engine on the test's own thread, ids in and ids out, and a plain loop to compare it with."""

import json
import random
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_text_model

from vllm_mlx.cache.tree import MemoryAwarePrefixCache
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.encoding import EncoderFacts
from vllm_mlx.core.errors import VLLMMLXError
from vllm_mlx.core.events import FinishReason, TokenLogprob
from vllm_mlx.core.memory import MemoryBudget
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.core.step import SequenceUpdate
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.lane import ServedModel, Source
from vllm_mlx.engine.loading import assemble, device_watch, make_scheduler
from vllm_mlx.engine.sizing import MeasuredModel, begin_drafting, budget_of, load_measured
from vllm_mlx.media.vision import VisionProbe
from vllm_mlx.runner.calibrate import Calibration
from vllm_mlx.runner.checkpoint import Checkpoint, find_checkpoint
from vllm_mlx.runner.libraries import knows
from vllm_mlx.runner.model import Model
from vllm_mlx.runner.mtp import FAMILIES
from vllm_mlx.scheduler.prefill_pacer import PrefillPacer
from vllm_mlx.scheduler.prefix_planner import PrefixPlanner

GREEDY = TokenSampling(temperature=0)
_NEAR_TIE = 1e-3  # in standard deviations of the logits; the two likeliest tokens are some 0.3 apart


class RandomPrompts:
    """Makes prompts of random ids, the same ones in every run."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def __call__(self, length: int) -> list[int]:
        return [self._random.randrange(500) for _ in range(length)]


@dataclass
class Reply:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: VLLMMLXError | None = None


class Driver:
    """An engine with a mailbox."""

    may_restart = True

    def __init__(
        self,
        path: Path,
        *,
        rows_bytes: int | None = None,
        probe: VisionProbe | None = None,
        calibration: Calibration | None = None,
        encoder: EncoderFacts | None = None,
        **settings: object,
    ):
        """`calibration`: in place of measurements, which take most of the time of a large checkpoint."""
        settings = {"max_model_len": 40_000, "memory_budget_bytes": 4 << 30, **settings}
        config = EngineConfig(model=str(path), **settings)
        checkpoint = find_checkpoint(str(path))
        measured = measured_once(config, checkpoint, probe, calibration)
        budget = budget_of(config)
        watch = device_watch(budget)
        source = Source(name=str(path), config=config, checkpoint=checkpoint, encoder=encoder)
        served = ServedModel(assemble(source, measured, budget, watch))
        served.start(measured.model)
        self.engine = LLMEngine([served], watch)
        if rows_bytes is not None:
            self.engine = squeezed(config, measured.model, self.engine, rows_bytes)
        self.may_restart = config.num_draft_tokens in ("auto", 0)  # a restart would hide a fault of drafts
        self.replies: dict[int, Reply] = {}
        self.seqs: dict[int, Sequence] = {}

    def add(
        self,
        prompt: Ids[int] | PromptInputs,
        max_tokens: int = 12,
        sampling: TokenSampling = GREEDY,
        points: Ids[int] = (),
        **fields: object,
    ) -> int:
        seq_id = len(self.seqs)
        inputs = prompt
        if not isinstance(inputs, PromptInputs):
            inputs = PromptInputs(token_ids=tuple(prompt), snapshot_points=tuple(points))
        seq = Sequence(seq_id=seq_id, prompt=inputs, sampling=sampling, max_tokens=max_tokens, **fields)
        self.seqs[seq_id], self.replies[seq_id] = seq, Reply()
        self.engine.add([seq])
        return seq_id

    @property
    def engine(self) -> LLMEngine:
        return self._engine

    @engine.setter
    def engine(self, engine: LLMEngine) -> None:
        self._engine = engine
        engine.listen(self.deliver)

    def step(self) -> None:
        self.engine.step()

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        assert self.may_restart or not self.engine.scheduler.num_restarts, "a row was restarted"

    def generate(self, prompts: Iterable[Ids[int] | PromptInputs], **kwargs: object) -> list[list[int]]:
        """All prompts at once."""
        seq_ids = [self.add(prompt, **kwargs) for prompt in prompts]
        self.run()
        return [self.replies[seq_id].token_ids for seq_id in seq_ids]

    def deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            reply = self.replies[update.seq_id]
            assert reply.finish_reason is None and reply.error is None, "news after the end"
            reply.token_ids += [token.token_id for token in update.tokens]
            reply.logprobs += [token.logprob for token in update.tokens]
            reply.finish_reason, reply.error = update.finish_reason, update.error


_measured: dict[tuple[object, ...], MeasuredModel] = {}


def measured_once(
    config: EngineConfig, checkpoint: Checkpoint, probe: VisionProbe | None, calibration: Calibration | None = None
) -> MeasuredModel:
    """To measure takes longer than most tests. What keeps images or has a head is loaded anew."""
    has_drafts = config.wants_drafts and checkpoint.architecture in FAMILIES
    key = checkpoint.path, config.text_only, probe is not None, has_drafts, config.draft_model
    if key not in _measured:
        if calibration is None:
            _measured[key] = load_measured(config, checkpoint, probe)
        else:
            model = begin_drafting(config, checkpoint).complete()
            _measured[key] = MeasuredModel(model=model, calibration=calibration)
    measured = _measured[key]
    if probe is None and not measured.model.num_head_layers:
        return measured
    return replace(measured, model=begin_drafting(config, checkpoint).complete())


def squeezed(config: EngineConfig, model: Model, engine: LLMEngine, rows_bytes: int) -> LLMEngine:
    """An engine whose live rows may take exactly `rows_bytes`. It takes over the runner, which has no row.

    It takes over the tree too, by which the runner of several ranks knows which state is in use.
    """
    tree = engine.cache_tree or MemoryAwarePrefixCache(max_bytes=rows_bytes)
    tree.set_limit(rows_bytes)
    memory = MemoryBudget(total_bytes=rows_bytes + 2, weights_bytes=1, transient_bytes=1)
    pacer = PrefillPacer(max_stall_s=0.2, max_chunk=512, tokens_per_s=1000, overhead_s=0.001)
    cache = PrefixPlanner(
        tree, "model", model.resume_rule, model.footprint, max_bytes=rows_bytes, snapshot_every=config.snapshot_every
    )
    scheduler = make_scheduler(config, model, memory, pacer, cache if config.prefix_cache else None)
    facts, runner = replace(engine.default.facts, memory=memory), engine.runner
    assembly = replace(engine.default.assembly, scheduler=scheduler, facts=facts)
    assembly.run = lambda _: runner  # type: ignore[method-assign]
    served = ServedModel(assembly)
    served.start(model)
    return LLMEngine([served], engine.watch)


@lru_cache(maxsize=2)
def _plain_model(path: Path) -> Any:
    config = json.loads((path / "config.json").read_text())
    return load_text_model(path)[0] if knows(config) else _Language(path)


class _Language:
    """A language model that only mlx-vlm has, called as those of mlx-lm are."""

    def __init__(self, path: Path):
        from mlx_vlm.utils import load_model

        self._language = load_model(path).language_model

    def make_cache(self) -> list[Any]:
        from mlx_vlm.models.cache import make_prompt_cache

        return list(make_prompt_cache(self._language))

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Compute the last token alone, as each one after it."""
        if tokens.shape[1] > 1:
            self._language(tokens[:, :-1], cache=cache)
        logits: mx.array = self._language(tokens[:, -1:], cache=cache).logits
        return logits


class ExpectedTokens(list[int]):
    """Greedy tokens. A reply equals them up to the first near tie, after which it may go on in another way.

    Two kernels add in another order. In fp32, which of them computes a row changes a token only there.
    """

    __hash__ = None

    def __init__(self, tokens: Iterable[int], logits: list[mx.array]):
        super().__init__(tokens)
        self._logits = logits

    def __eq__(self, reply: object) -> bool:
        if not isinstance(reply, list) or len(reply) != len(self):
            return False
        first = next((place for place, (own, other) in enumerate(zip(self, reply, strict=True)) if own != other), None)
        return first is None or self._is_near_tie(first, reply[first])

    def __ne__(self, reply: object) -> bool:
        return not self == reply

    def _is_near_tie(self, place: int, token: int) -> bool:
        logits = self._logits[place].astype(mx.float32)
        gap = logits[self[place]] - logits[token]
        return bool((gap <= _NEAR_TIE * mx.std(logits)).item())


def plain_loop(path: Path, prompt: Ids[int], max_tokens: int) -> tuple[ExpectedTokens, list[mx.array]]:
    """Greedy tokens of one row and the logits behind each, without any of our code. Of equal arguments, made once."""
    return _plain_loop(path, tuple(prompt), max_tokens)


@lru_cache(maxsize=32)
def _plain_loop(path: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[ExpectedTokens, list[mx.array]]:
    model = _plain_model(path)
    caches = make_prompt_cache(model)
    logits = model(mx.array([list(prompt)]), cache=caches)[0, -1]
    tokens, rows = [], []
    while len(tokens) < max_tokens:
        if tokens:
            logits = model(mx.array([[tokens[-1]]]), cache=caches)[0, -1]
        tokens.append(int(mx.argmax(logits).item()))
        rows.append(logits)
    return ExpectedTokens(tokens, rows), rows
