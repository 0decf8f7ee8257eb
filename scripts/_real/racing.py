"""The same work on this server and on mlx-lm's: a new prompt, ten turns of a chat, one stream. It judges nothing."""

import itertools
import sys
import time
from dataclasses import dataclass, field
from functools import partial

from mlx_lm.utils import load

from scripts._bench.checkpoint import Prompts
from scripts._bench.client import Messages, Reply, read, start
from scripts._bench.figures import Figure, measure
from scripts._bench.report import print_table
from scripts._bench.servers import MLX_LM, both_running
from scripts._bench.serving import tokens_per_s

from .checkpoints import checkpoint
from .conversation import QUESTIONS
from .sources import Source

_TURNS, _REPLY, _PROMPT = 10, 16, 1000
NUM_RUNS = 3
_STORY = "Write a long story about a river and the people beside it."
_STORY_TOKENS = 64


@dataclass(slots=True)
class Load:
    """One server. Both get the same conversations, and greedy replies in float32 are the same."""

    port: int
    prompts: Prompts  # of its own, so that both draw the same
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    said: list[str] = field(default_factory=list)

    def prefill_ms(self) -> float:
        reply, _ = self._ask([{"role": "user", "content": f"{self.prompts.text(_PROMPT)}\n\n{_STORY}"}], 4)
        return 1000 * reply.ttft_s

    def turns_s(self) -> float:
        messages: Messages = [{"role": "system", "content": f"You are helper number {next(self.numbers)}."}]
        started = time.perf_counter()
        for question in QUESTIONS[:_TURNS]:
            messages.append({"role": "user", "content": question})
            _, text = self._ask(messages, _REPLY)
            messages.append({"role": "assistant", "content": text})
            self.said.append(text)
        return time.perf_counter() - started

    def decode_rate(self) -> float:
        reply, text = self._ask([{"role": "user", "content": f"{next(self.numbers)}. {_STORY}"}], _STORY_TOKENS)
        self.said.append(text)
        return tokens_per_s([reply])

    def _ask(self, messages: Messages, max_tokens: int) -> tuple[Reply, str]:
        streams = start(self.port, [messages], max_tokens)
        read(streams)
        return streams[0].reply(), streams[0].message()["content"]


def check(source: Source, form: str, num_runs: int = NUM_RUNS) -> tuple[bool, list[str]]:
    model = checkpoint(source, form)
    tokenizer = load(str(model))[1]
    with both_running(model, MLX_LM) as ports:
        loads = {name: Load(port, Prompts(tokenizer)) for name, port in ports.items()}
        series = measure(_figures(loads), num_runs=num_runs, progress=partial(print, file=sys.stderr, flush=True))
    print_table(series)
    ours, theirs = (load.said for load in loads.values())
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return True, [f"{equal} of {len(ours)} replies are those of mlx-lm's server"]


def _figures(loads: dict[str, Load]) -> list[Figure]:
    def figure(name: str, unit: str, method: str, bound: float, at_least: bool = False) -> Figure:
        measures = {subject: getattr(load, method) for subject, load in loads.items()}
        return Figure(name, unit, measures, (MLX_LM.aim(bound, at_least=at_least),))

    return [
        figure(f"first token after {_PROMPT:,} new tokens", "ms", "prefill_ms", 1.05),
        figure(f"{_TURNS} turns of a chat", "s", "turns_s", 1.0),
        figure("decode, 1 stream", "tokens/s", "decode_rate", 1.0, at_least=True),
    ]
