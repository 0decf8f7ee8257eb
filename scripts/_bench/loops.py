"""Bare decode loops: a model over mlx-lm's caches, one step ahead of reading. What a server's cost is held against."""

import time
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache


class BareLoop:
    def __init__(self, model: Any):
        self._model = model

    def tokens_per_s(self, prompts: list[list[int]], num_tokens: int) -> float:
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

    def graph_us(self, prompts: list[list[int]], num_steps: int) -> float:
        """Median processor time of building the graph of one step, in µs."""
        caches, tokens = self._prefill(prompts)
        seconds = []
        for _ in range(num_steps):
            start = time.thread_time()
            tokens = self._step(tokens, caches)
            seconds.append(time.thread_time() - start)
            mx.eval(tokens)
        return 1e6 * median(seconds)

    def _prefill(self, prompts: list[list[int]]) -> tuple[list[Any], mx.array]:
        """Caches of all rows and their first tokens: (rows,). One row keeps its plain caches."""
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
