"""A served model for the checks: prompts of an exact length, and streams with the moments of their text."""

import itertools
import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.commands import address, served

_SILENCE_S = 1800.0  # a long prompt on a slow Mac takes minutes
Fields = dict[str, Any]
Status = dict[str, Any]  # the reply of /v1/status


@dataclass(frozen=True, slots=True)
class Stream:
    """A streamed reply: when it was asked for, and the moments at which text arrived."""

    num_tokens: int
    sent_s: float
    moments: tuple[float, ...]

    @property
    def worst_gap_s(self) -> float:
        return max((later - earlier for earlier, later in itertools.pairwise(self.moments)), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        if len(self.moments) < 2:
            return 0.0
        return (self.num_tokens - 1) / max(1e-9, self.moments[-1] - self.moments[0])


class Server:
    """A server of this checkout in another process."""

    def __init__(self, process: subprocess.Popen[str], printed: str):
        self.process = process
        self.printed = printed
        self._url = address(printed)
        self._chance = random.Random(0)
        self._vocabulary = int(self.status()["model_facts"]["vocab_size"])

    def status(self) -> Status:
        return dict(httpx.get(f"{self._url}/v1/status", timeout=60, trust_env=False).raise_for_status().json())

    def prompt(self, num_tokens: int) -> list[int]:
        """Random ids from the middle of the vocabulary, where no special tokens are: no prompt repeats another."""
        low, high = self._vocabulary // 4, self._vocabulary // 2
        return [self._chance.randrange(low, high) for _ in range(num_tokens)]

    def complete(self, prompt: Sequence[int] | str, num_tokens: int, **fields: Any) -> Fields:
        """Ask for one greedy reply of exactly `num_tokens` tokens."""
        answer = httpx.post(
            f"{self._url}/v1/completions", json=_body(prompt, num_tokens, fields), timeout=_SILENCE_S, trust_env=False
        )
        return dict(answer.raise_for_status().json())

    def stream(self, prompt: Sequence[int] | str, num_tokens: int, **fields: Any) -> Stream:
        body = _body(prompt, num_tokens, {**fields, "stream": True})
        sent_s, moments = time.perf_counter(), list[float]()
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=_SILENCE_S, trust_env=False) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:]).get("choices")
                    if choices and choices[0].get("text"):
                        moments.append(time.perf_counter())
        return Stream(num_tokens, sent_s, tuple(moments))

    def streams(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Stream]:
        """Stream the replies to all prompts together."""
        with ThreadPoolExecutor(max(1, len(prompts))) as pool:
            asked: list[Future[Stream]] = [pool.submit(self.stream, prompt, num_tokens) for prompt in prompts]
            return [future.result() for future in asked]

    def stop(self) -> int:
        """Send SIGTERM. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def _body(prompt: Sequence[int] | str, num_tokens: int, fields: Fields) -> Fields:
    return {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, **fields}


@contextmanager
def serving(log: Path, *arguments: str, **variables: str) -> Iterator[Server]:
    """Serve a model until the block ends. Its log is appended to `log`. `variables` are of the environment."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file, served(*arguments, stderr=file, **variables) as (process, printed):
        if process.poll() is not None or "Ctrl-C" not in printed:
            raise RuntimeError(f"The server did not start: {log.read_text(encoding='utf-8')[-500:].strip()}")
        yield Server(process, printed)
