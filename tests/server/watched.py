"""A real engine behind a socket, and clients that count what they saw of it."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.running import NAMES, Running, serving
from vllm_mlx.cli.remote import events_of
from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import open_disk, start_engine


@contextlib.contextmanager
def engine_served(path: Path | str, *, options: dict | None = None, **settings: object) -> Iterator[Running]:
    config = EngineConfig(**{"model": str(path), "memory_budget_bytes": 2 << 30, **settings})
    disk = open_disk(config) if config.cache_dir is not None else None
    name, *aliases = (options or {}).get("served_model_names", NAMES)
    models = Catalogue((Entry(config=config, name=name, aliases=tuple(aliases)),))
    with serving(start_engine(config, disk, models), **(options or {})) as running:
        yield running


@dataclass
class Seen:
    """What one streaming client saw, by its own clock."""

    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)  # of events with a token
    ended_s: float = 0.0
    usage: dict = field(default_factory=dict)
    request_id: str = ""
    error: dict | None = None

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s


def watch(url: str, text: str, *, max_tokens: int, seen: Seen | None = None, **fields: object) -> Seen:
    """One streamed reply of exactly `max_tokens`, unless something ends it."""
    seen = seen or Seen()
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True}
    with httpx.Client(timeout=120, trust_env=False, verify=False) as client:
        seen.sent_s = time.monotonic()
        _read(client, f"{url}/v1/completions", body, seen)
    return seen


def _read(client: httpx.Client, url: str, body: dict, seen: Seen) -> None:
    with client.stream("POST", url, json=body) as reply:
        for event in events_of(reply.iter_lines()):
            seen.request_id = seen.request_id or event.get("id", "")
            seen.error = event.get("error", seen.error)
            seen.usage = event.get("usage") or seen.usage
            if event.get("choices") and event["choices"][0]["text"]:
                seen.arrivals_s.append(time.monotonic())
    seen.ended_s = time.monotonic()


def load(url: str, texts: list[str], *, max_tokens: int) -> list[Seen]:
    """All at once."""
    seen = [Seen() for _ in texts]
    threads = [
        threading.Thread(target=watch, args=(url, text), kwargs={"max_tokens": max_tokens, "seen": each})
        for text, each in zip(texts, seen, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return seen
