"""Workload set `reasoning`: the values of --cache-reasoning beside each other, on conversations with long reasoning.

Three servers, alike but for that setting, hold the same conversations: some in which a question follows each reply, so
that the template omits the reasoning, and some in which the result of a tool call follows, so that it stays. The
checkpoint answers everything with reasoning and a call; the prefix cache has less room than all reasoning takes.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from scripts.served import BenchmarkError, Messages, read, serving, start
from tests.support.rote import rote_checkpoint
from vllm_mlx.cli.bench import Words
from vllm_mlx.cli.remote import Remote

from .figures import OURS, Figure, Measure, Played, at_least, at_most, read_off

POLICIES = {OURS: "auto", "keep": "keep", "drop": "drop"}  # subject → value of the setting
CACHE_MEMORY = "12MB"
SYSTEM_WORDS, WORDS = 300, 20  # of a system prompt; of a question and of a tool's result
QUESTIONS, TOOL_LOOP = "questions", "tool loop"
_TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "path": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Size:
    thought_tokens: int = 300
    num_turns: int = 4
    num_conversations: Mapping[str, int] = field(default_factory=lambda: {QUESTIONS: 10, TOOL_LOOP: 2})


@dataclass(slots=True)
class PolicyLoad(Played):
    """One server. `play` holds all conversations of one kind in turn."""

    port: int
    words: Words
    size: Size

    def play(self, kind: str) -> float:
        """Return the share of prompt tokens, from the second turn on, that came from the cache, in %."""
        server = Remote(f"http://127.0.0.1:{self.port}")
        server.ask("/v1/cache", "DELETE")
        conversations = [self._begin() for _ in range(self.size.num_conversations[kind])]
        cached = total = 0
        ttfts_ms = []
        for turn in range(self.size.num_turns):
            for messages in conversations:
                usage, ttft_s = self._take_turn(messages, kind)
                if turn > 0:
                    cached += usage["prompt_tokens_details"]["cached_tokens"]
                    total += usage["prompt_tokens"]
                    ttfts_ms.append(1000 * ttft_s)
        cache = server.status()["cache"]
        self.values |= {f"{kind}, TTFT p50": median(ttfts_ms), f"{kind}, held at the end": cache["current_memory_mb"]}
        return 100 * cached / total

    def _begin(self) -> Messages:
        return [{"role": "system", "content": self.words.text(SYSTEM_WORDS)}, self._question()]

    def _question(self) -> dict[str, Any]:
        return {"role": "user", "content": self.words.text(WORDS)}

    def _take_turn(self, messages: Messages, kind: str) -> tuple[dict[str, Any], float]:
        """Ask for one reply, and add it and its answer, as an agent does that sends reasoning back."""
        fields = {"tools": [_TOOL]} if kind == TOOL_LOOP else {}  # a call of no tool is text
        [stream] = start(self.port, [messages], self.size.thought_tokens + 50, fields)
        read([stream])
        reply, message = stream.reply(), stream.message()
        calls = message.get("tool_calls", [])
        if reply.usage is None or not message.get("reasoning_content") or bool(calls) != bool(fields):
            raise BenchmarkError("A reply has no reasoning, or no call or text after it.")
        messages.append(message)
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.words.text(WORDS)})
        if not calls:
            messages.append(self._question())
        return reply.usage, reply.ttft_s


@contextlib.contextmanager
def prepared(model: Path) -> Iterator[list[Figure]]:
    """Yield the figures of this set. `model` is not used, because it does not end its reasoning by itself."""
    folder = model.parent / f"{model.name}-thoughts"
    folder.mkdir()
    size = Size()
    path = rote_checkpoint(folder, "qwen3", thought_tokens=size.thought_tokens)
    with contextlib.ExitStack() as stack:
        loads = {}
        for subject, policy in POLICIES.items():
            settings = ("--cache-reasoning", policy, "--cache-memory", CACHE_MEMORY, "--tool-grammar", "off")
            server = stack.enter_context(serving(None, str(path), *settings))
            loads[subject] = PolicyLoad(server.port, Words(0), size)
        yield figures(loads)


def figures(loads: Mapping[str, PolicyLoad]) -> list[Figure]:
    """Return the figures in their order. For each kind of conversation the first one plays, the others read."""
    others, found = [subject for subject in POLICIES if subject != OURS], []
    for kind in (QUESTIONS, TOOL_LOOP):
        plays: dict[str, Measure] = {subject: partial(load.play, kind) for subject, load in loads.items()}
        found.append(Figure(f"{kind}, hit rate", "%", plays, tuple(at_least(0.99, other) for other in others)))
        found.append(read_off(f"{kind}, TTFT p50", "ms", loads, *(at_most(1.05, other) for other in others)))
        found.append(read_off(f"{kind}, held at the end", "MB", loads))
    return found
