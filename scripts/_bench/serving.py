"""Workload sets `serving`, whose prompts are all new, and `cache`: the time to the first token of known prompts."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from scripts.served import BenchmarkError, Messages, Reply, ask, tokens_per_s, worst_gap_s
from vllm_mlx.core.config import EngineConfig

from .checkpoint import Prompts
from .figures import BARE, Aim, Figure, Measure, Played, Rival, at_least, at_most, both_running, read_off

SHORT_PROMPT = 16  # tokens, without those of the chat template
NUM_DECODED = {1: 384, 8: 192}  # streams → tokens of each reply
NUM_DECODERS = 4
LONG_PROMPT = 5000
COLD_PROMPTS = (2000, 5000)
NUM_SHORT_REQUESTS = 5  # of one measurement
FEW_TOKENS = 4  # of a reply of which the first token counts
_MAX_CACHED = 64  # tokens that two random prompts may share, their template's beginning included
_SETTLE_S = 0.3
_STALL_S = 1.5 * EngineConfig(model="").stall_ms / 1000


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The measurements that are made over HTTP, on one server."""

    port: int
    prompts: Prompts

    def decode_rate(self, num_streams: int) -> float:
        """Return tokens/s of all streams together."""
        texts = [self.prompts.text(SHORT_PROMPT) for _ in range(num_streams)]
        return tokens_per_s(self._ask(texts, NUM_DECODED[num_streams]))

    def worst_gap(self) -> float:
        """Seconds: the longest pause of any of four decoding streams from the arrival of a long prompt to its reply."""
        long_text = self.prompts.text(LONG_PROMPT)
        short_texts = [self.prompts.text(SHORT_PROMPT) for _ in range(NUM_DECODERS)]
        gap_s = worst_gap_s(self.port, short_texts, long_text, FEW_TOKENS)
        self._settle()
        return gap_s

    def ttft_ms(self, num_tokens: int, num_requests: int = 1) -> float:
        """Return the median of requests one after the other, each on an idle server."""
        values = []
        for _ in range(num_requests):
            [reply] = self._ask([self.prompts.text(num_tokens)], FEW_TOKENS)
            values.append(reply.ttft_s)
        return 1000 * median(values)

    def _ask(self, texts: list[str], max_tokens: int) -> list[Reply]:
        replies = ask(self.port, texts, max_tokens)
        for reply in replies:
            details = (reply.usage or {}).get("prompt_tokens_details") or {}
            if details.get("cached_tokens", 0) > _MAX_CACHED:
                raise BenchmarkError(f"A prompt meant to be new was found in a cache: {reply.usage}")
        time.sleep(0.05)  # the server finishes its own bookkeeping
        return replies

    def _settle(self) -> None:
        """Wait until aborted requests are gone."""
        time.sleep(_SETTLE_S)
        self._ask([self.prompts.text(SHORT_PROMPT)], FEW_TOKENS)


class BareLoop:
    """A model over mlx-lm's caches, one step ahead of reading. A server's cost is compared with it."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Prompts):
        self._model, self._tokenizer, self._prompts = model, tokenizer, prompts

    def decode_rate(self, num_streams: int) -> float:
        """Return tokens/s of all rows together."""
        texts = [self._prompts.text(SHORT_PROMPT) for _ in range(num_streams)]
        return self._tokens_per_s([self._tokenizer.encode(text) for text in texts], NUM_DECODED[num_streams])

    def _tokens_per_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Greedy replies to prompts of equal length, decoded together; the first tokens are not timed."""
        caches, first = self._prefill(prompts)
        mx.eval(first)
        start = time.perf_counter()
        tokens = first
        for _ in range(num_tokens - 1):
            following = self._step(tokens, caches)
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            tokens.tolist()
            tokens = following
        tokens.tolist()
        return len(prompts) * (num_tokens - 1) / (time.perf_counter() - start)

    def _prefill(self, prompts: list[list[int]]) -> tuple[list[Any], mx.array]:
        """Compute the caches of all rows and their first tokens: (rows,). One row keeps its plain caches."""
        rows, firsts = [], []
        for prompt in prompts:
            caches = make_prompt_cache(self._model)
            firsts.append(mx.argmax(self._model(mx.array([prompt]), cache=caches)[:, -1], axis=-1))
            mx.eval(firsts[-1])
            rows.append(caches)
        if len(rows) == 1:
            return rows[0], firsts[0]
        return [layers[0].merge(list(layers)) for layers in zip(*rows, strict=True)], mx.concatenate(firsts)

    def _step(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        return mx.argmax(self._model(tokens[:, None], cache=caches)[:, -1], axis=-1)


@contextlib.contextmanager
def serving(model: Path, rival: Rival) -> Iterator[list[Figure]]:
    """Yield the figures of this set, measurable while the block runs."""
    module, tokenizer = load(str(model))[:2]
    prompts = Prompts(tokenizer)
    loop = BareLoop(module, tokenizer, prompts)
    with both_running(model, rival) as ports:
        yield _figures({subject: ServerLoad(port, prompts) for subject, port in ports.items()}, loop, rival)


def _figures(loads: dict[str, ServerLoad], loop: BareLoop, rival: Rival) -> list[Figure]:
    worst = {subject: load.worst_gap for subject, load in loads.items()}
    short, cold = rival.aim(1.2, at_least=False), rival.aim(1.05, at_least=False)
    return [
        _decode_figure(loads, loop, 1, rival.aim(1.0, at_least=True), at_least(0.95, BARE)),
        _decode_figure(loads, loop, 8, rival.aim(1.4, at_least=True), at_least(0.92, BARE)),
        Figure(f"worst gap of {NUM_DECODERS}, {LONG_PROMPT:,} prefilling", "s", worst, (at_most(_STALL_S),)),
        *(_ttft_figure(loads, f"cold TTFT, {length:,} tokens", length, 1, cold) for length in COLD_PROMPTS),
        _ttft_figure(loads, f"TTFT, {SHORT_PROMPT} tokens, idle", SHORT_PROMPT, NUM_SHORT_REQUESTS, short),
    ]


def _decode_figure(loads: dict[str, ServerLoad], loop: BareLoop, num_streams: int, *aims: Aim) -> Figure:
    measures: dict[str, Measure] = {subject: partial(load.decode_rate, num_streams) for subject, load in loads.items()}
    measures[BARE] = partial(loop.decode_rate, num_streams)
    return Figure(f"decode, {num_streams} stream{'s' if num_streams > 1 else ''}", "tokens/s", measures, aims)


def _ttft_figure(loads: dict[str, ServerLoad], name: str, num_tokens: int, num_requests: int, aim: Aim) -> Figure:
    measures = {subject: partial(load.ttft_ms, num_tokens, num_requests) for subject, load in loads.items()}
    return Figure(name, "ms", measures, (aim,))


SYSTEM_PROMPT = 5000  # tokens
_QUESTION = 24
_REPLY = 8
CROWD = 4
_SHARE = at_most(3.0)  # % of the cold time that a known prompt may take
_CROWD_SHARE = at_most(1.05)  # of one alone
_SCENARIOS = ("new question", "next turn")
_CROWD = f"{CROWD} at once, one new prefix"


@dataclass(slots=True)
class CacheLoad(Played):
    """One server. `play` runs all scenarios on new prompts."""

    port: int
    prompts: Prompts
    repeats_prompts: bool  # mlx-lm's server does not survive a prompt that it holds whole

    def play(self) -> float:
        """Return the cold time to the first token, in milliseconds."""
        system = {"role": "system", "content": self.prompts.text(SYSTEM_PROMPT)}
        first = [system, self._question()]
        cold = self._ttft_ms([first])
        new_question = self._ttft_ms([[system, self._question()]])
        turn = [*first, {"role": "assistant", "content": self.prompts.text(_REPLY)}, self._question()]
        for scenario, ms in zip(_SCENARIOS, (new_question, self._ttft_ms([turn])), strict=True):
            self.values |= {f"{scenario}, TTFT": ms, f"{scenario}, of cold": 100 * ms / cold}
        if self.repeats_prompts:
            self.values["identical prompt, of cold"] = 100 * self._ttft_ms([first]) / cold
        shared = {"role": "system", "content": self.prompts.text(SYSTEM_PROMPT)}
        self.values[_CROWD] = self._ttft_ms([[shared, self._question()] for _ in range(CROWD)]) / cold
        return cold

    def _question(self) -> dict[str, str]:
        return {"role": "user", "content": self.prompts.text(_QUESTION)}

    def _ttft_ms(self, conversations: list[Messages]) -> float:
        """Return the time of the last of all requests that are sent together."""
        return max(1000 * reply.ttft_s for reply in ask(self.port, conversations, _REPLY))


@contextlib.contextmanager
def caching(model: Path, rival: Rival) -> Iterator[list[Figure]]:
    """Yield the figures of this set, measurable while the block runs."""
    prompts = Prompts(load(str(model))[1])
    with both_running(model, rival) as ports:
        repeats = {name: name != rival.name or rival.checkout is not None for name in ports}
        yield _cache_figures({name: CacheLoad(port, prompts, repeats[name]) for name, port in ports.items()}, rival)


def _cache_figures(loads: dict[str, CacheLoad], rival: Rival) -> list[Figure]:
    """Return the figures in their order: the first one plays, the others read."""
    plays = {name: load.play for name, load in loads.items()}
    found = [Figure(f"cold TTFT, {SYSTEM_PROMPT:,} tokens", "ms", plays, (rival.aim(1.05, at_least=False),))]
    for scenario in _SCENARIOS:
        found.append(read_off(f"{scenario}, TTFT", "ms", loads, rival.aim(1.0, at_least=False)))
        found.append(read_off(f"{scenario}, of cold", "%", loads, _SHARE))
    repeating = {name: load for name, load in loads.items() if load.repeats_prompts}
    found.append(read_off("identical prompt, of cold", "%", repeating, _SHARE))
    return [*found, read_off(_CROWD, "× cold", loads, _CROWD_SHARE)]
