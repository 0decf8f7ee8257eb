"""Five models that share room for two, requests in four protocols, and a watch over what the engine does with them."""

import base64
import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import httpx
import mlx.core as mx

from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import EngineConfig, ModelConfig
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.loading import start_engine

from .checkpoints import checkpoint
from .protocols import PROTOCOLS, Completions, Protocol
from .running import Running, serving
from .shapes import draw_shape

WIDE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 384}  # so that weights are about as many as the demo's
WIDE_MIXTURE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("qwen3", WIDE),
    "hybrid": ("qwen3_5", WIDE),
    "mixture": ("gpt_oss", WIDE_MIXTURE),
    "images": ("vision:qwen3_vl", {**WIDE, "tower": {"out_hidden_size": 192}}),
    "demo": ("demo", {}),
}
SEES = ("images", "demo")
BUDGET = 27_000_000  # two models take 12 MB, a step 6 MB, what stays of all five 5 MB, and rows the rest
NUM_TOKENS = 10
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "asks", "what", "is", "new")
PATHS = tuple(protocol.path for protocol in PROTOCOLS.values())


def path_of(name: str) -> str:
    architecture, options = MODELS[name]
    return architecture if architecture == "demo" else str(checkpoint(architecture, **options))


@contextmanager
def served(*names: str, **settings: Any) -> Iterator[Running]:
    """Serve these models, of which two fit unless the settings give them more memory."""
    entries = (Entry(config=ModelConfig(model=path_of(name), max_model_len=1024), name=name) for name in names)
    models = Catalogue(tuple(entries))
    settings = {"memory_budget_bytes": BUDGET, "max_prefill_chunk": 64, "max_num_seqs": 8, **settings}
    config = EngineConfig(model=models.entries[0].config.model, **settings)
    with serving(start_engine(config, None, models), models=models) as running:
        yield running


@dataclass(frozen=True)
class Asked:
    """A request, the same for the same numbers."""

    model: str
    path: str
    text: int

    @property
    def protocol(self) -> Protocol:
        return next(protocol for protocol in PROTOCOLS.values() if protocol.path == self.path)

    @property
    def body(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": NUM_TOKENS}
        if isinstance(self.protocol, Completions):
            return self.protocol.body(self._words, **fields, ignore_eos=True)
        if self.text % 2 or self.model not in SEES:
            return self.protocol.body(self._words, **fields)
        return self.protocol.body(
            [self.protocol.image_part(_image(self.text)), self.protocol.text_part(self._words)], **fields
        )

    @property
    def _words(self) -> str:
        draw = random.Random(self.text)
        return " ".join(draw.choice(WORDS) for _ in range(20 + 10 * (self.text % 4)))

    def ask(self, client: httpx.Client) -> Any:
        """Return what the model said, why it ended, and how many tokens prompt and reply have."""
        answer = client.post(self.path, json=self.body, timeout=240)
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        counts = self.protocol.counts(reply)
        return self.protocol.content(reply), self.protocol.end(reply), counts.prompt, counts.completion


@lru_cache
def _image(number: int) -> str:
    file = io.BytesIO()
    draw_shape(("red", "blue", "green")[number % 3], ("circle", "square")[number // 3 % 2], 112).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@dataclass
class Watch:
    """Looks at the engine after each step and each move of weights. It belongs to the engine thread."""

    num_looks: int = 0
    most_bytes: int = (
        0  # of weights, rows, cached state, a step and what stays of each model, by the engine's own count
    )
    most_active_bytes: int = 0  # by MLX's count
    most_loads: int = 0  # that began while one request waited
    num_preempted: int = 0  # rows, in a step with a load under way
    _first_seen: dict[int, int] = field(default_factory=dict)
    _num_before: int = 0

    def begin(self, engine: LLMEngine) -> None:
        step, move = engine.step, engine.move

        def watched_step(*args: Any) -> None:
            step(*args)
            self._look(engine)

        def watched_move(*args: Any) -> None:
            move(*args)
            self._look(engine)

        engine.step, engine.move = watched_step, watched_move  # type: ignore[method-assign]

    def _look(self, engine: LLMEngine) -> None:
        self.num_looks += 1
        self.most_bytes = max(self.most_bytes, promised_bytes(engine))
        self.most_active_bytes = max(self.most_active_bytes, mx.get_active_memory())
        num_preemptions = sum(model.scheduler.num_preemptions for model in engine.models)
        if any(model.state == "loading" for model in engine.models):
            self.num_preempted += num_preemptions - self._num_before
        self._num_before = num_preemptions
        num_loads = sum(sum(model.loads.values()) for model in engine.models)
        for seq_id in {seq.seq_id for model in engine.models for seq in model.waiting}:
            since = self._first_seen.setdefault(seq_id, num_loads)
            self.most_loads = max(self.most_loads, num_loads - since)


def promised_bytes(engine: LLMEngine) -> int:
    """What the engine has promised of the budget. Cached state takes the rest, and is evicted for it."""
    total = max((each.memory.transient_bytes for each in engine.models if each.takes_memory), default=0)
    for model in engine.models:
        total += model.taken_bytes + model.scheduler.room.rows_bytes()
        total += model.memory.media_bytes + model.memory.grammars_bytes
    return total
