"""A served model for the tools: requests to it, prompts of an exact length, and streams with the moments of their text.

It judges no reply.
"""

import itertools
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.commands import address, served
from vllm_mlx.cli.remote import events_of

_SILENCE_S = 1800.0  # a long prompt on a slow Mac takes minutes
COMPLETIONS = "/v1/completions"
Fields = dict[str, Any]
Prompt = Sequence[int] | str


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
        self._url = address(printed)
        self._chance = random.Random(0)
        status = self.status()
        self._model, self._vocabulary = str(status["model"]), int(status["model_facts"]["vocab_size"])

    def status(self) -> Fields:
        return dict(httpx.get(f"{self._url}/v1/status", timeout=60, trust_env=False).raise_for_status().json())

    def answer(self, path: str, body: Fields) -> httpx.Response:
        return httpx.post(self._url + path, json=self._full(body), timeout=_SILENCE_S, trust_env=False)

    def post(self, path: str, body: Fields) -> Fields:
        return dict(self.answer(path, body).raise_for_status().json())

    def prompt(self, num_tokens: int) -> list[int]:
        """Draw ids from the middle of the vocabulary, where no special tokens are: no prompt repeats another."""
        low, high = self._vocabulary // 4, self._vocabulary // 2
        return [self._chance.randrange(low, high) for _ in range(num_tokens)]

    def complete(self, prompt: Prompt, num_tokens: int, **fields: Any) -> Fields:
        """Ask for one greedy reply of exactly `num_tokens` tokens."""
        return self.post(COMPLETIONS, _body(prompt, num_tokens, fields))

    def stream(self, prompt: Prompt, num_tokens: int, *, most_events: int | None = None) -> Stream:
        """Stream such a reply. After `most_events`, leave it where it is."""
        body = self._full(_body(prompt, num_tokens, {"stream": True}))
        sent_s, moments = time.perf_counter(), list[float]()
        url = self._url + COMPLETIONS
        with httpx.stream("POST", url, json=body, timeout=_SILENCE_S, trust_env=False) as answer:
            answer.raise_for_status()
            for event in itertools.islice(events_of(answer.iter_lines()), most_events):
                if (choices := event.get("choices")) and choices[0].get("text"):
                    moments.append(time.perf_counter())
        return Stream(num_tokens, sent_s, tuple(moments))

    def streams(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Stream]:
        """Stream the replies to all prompts together."""
        with ThreadPoolExecutor(max(1, len(prompts))) as pool:
            asked = [pool.submit(self.stream, prompt, num_tokens) for prompt in prompts]
            return [future.result() for future in asked]

    def stop(self) -> int:
        """Send SIGTERM. Return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def _full(self, body: Fields) -> Fields:
        return {"model": self._model, **body}


def _body(prompt: Prompt, num_tokens: int, fields: Fields) -> Fields:
    return {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, **fields}


@contextmanager
def serving(log: Path | None, *arguments: str, **variables: str) -> Iterator[Server]:
    """Serve a model until the block ends, then kill the server. `variables` are of the environment.

    Its log is appended to `log`; without one, it goes to stderr.
    """
    if log is None:
        with served(*arguments, "--log-level", "warning", **variables) as (process, printed):
            yield Server(process, printed)
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file, served(*arguments, stderr=file, **variables) as (process, printed):
        if process.poll() is not None or "Ctrl-C" not in printed:
            raise RuntimeError(f"The server did not start: {log.read_text(encoding='utf-8')[-500:].strip()}")
        yield Server(process, printed)
