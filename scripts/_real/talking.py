"""A served checkpoint and requests to it. It judges no reply."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.commands import address, served

_SILENCE_S = 600.0
_EVENTS = 8  # of a stream that is left
_NAME = "real"


@dataclass(frozen=True, slots=True)
class Server:
    url: str

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return dict(self.answer(path, body).raise_for_status().json())

    def get(self, path: str) -> dict[str, Any]:
        return dict(httpx.get(self.url + path, timeout=_SILENCE_S, trust_env=False).raise_for_status().json())

    def answer(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": _NAME, **body}, timeout=_SILENCE_S, trust_env=False)

    def begin_stream(self, body: dict[str, Any]) -> None:
        """Read the first events of a long reply, and leave it where it is."""
        body = {"model": _NAME, "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True, **body}
        url = f"{self.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=_SILENCE_S, trust_env=False) as answer:
            lines = answer.iter_lines()
            for _ in range(_EVENTS):
                next(lines)


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Server]:
    """Serve the checkpoint during the block. The server is ended by `kill -9`."""
    with served(str(folder), "--served-model-name", _NAME, "--log-level", "warning", *arguments) as (_, printed):
        yield Server(address(printed))
