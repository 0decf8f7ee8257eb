"""Kills the server at random moments under load. The next start gives the same replies, and no file is left over."""

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.commands import address, served

from .questions import CHAT, QUESTIONS, said

CLIENTS = 4
LONGEST_S = 4.0  # from the first requests to the kill
KERNELS = "mlx"
ASKED = ("france", "circle", "tools")  # of each start


def many_kills(options: argparse.Namespace) -> dict[str, Any]:
    chance, wrong, port = random.Random(options.seed), [], "0"
    expected: dict[str, Any] = {}
    starts_s, num_broken = [], 0
    with _temporary() as folder:
        for number in range(options.times):
            started_s = time.monotonic()
            with served(options.model, "--port", port, "--log-level", "warning", TMPDIR=str(folder)) as (
                process,
                printed,
            ):
                url = address(printed)
                starts_s.append(round(time.monotonic() - started_s, 1))
                for name in ASKED:
                    found = _answer(url, name)
                    if found != expected.setdefault(name, found):
                        wrong.append(f"start {number}, {name}: {found} instead of {expected[name]}")
                num_broken += _kill_under_load(process.kill, url, chance)
            wrong += [f"start {number} left {path}" for path in folder.iterdir() if path.name != KERNELS]
            port = str(httpx.URL(url).port)  # the same again: it must be free
            print(f"{number + 1} kills, {num_broken} requests broken, {len(wrong)} wrong", file=sys.stderr, flush=True)
    return {"kills": options.times, "requests_broken": num_broken, "longest_start_s": max(starts_s), "wrong": wrong}


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    """Make an empty temporary folder for servers, with the kernels that MLX has compiled on this machine before."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / KERNELS).symlink_to(Path(tempfile.gettempdir()) / KERNELS)
        yield Path(folder)


def _answer(url: str, name: str) -> Any:
    answer = httpx.post(f"{url}{CHAT}", json=QUESTIONS[name], timeout=300, trust_env=False)
    return said(answer.raise_for_status().json()["choices"])


def _kill_under_load(kill: Any, url: str, chance: random.Random) -> int:
    """Kill the server under load. Return the number of requests that broke."""
    broken: list[str] = []
    seeds = [chance.random() for _ in range(CLIENTS)]
    threads = [threading.Thread(target=_ask_until_broken, args=(url, random.Random(seed), broken)) for seed in seeds]
    for thread in threads:
        thread.start()
    time.sleep(chance.uniform(0, LONGEST_S))
    kill()
    for thread in threads:
        thread.join()
    return len(broken)


def _ask_until_broken(url: str, chance: random.Random, broken: list[str]) -> None:
    with contextlib.suppress(httpx.ConnectError), httpx.Client(timeout=300, trust_env=False) as http:
        while not broken:
            name = chance.choice(list(QUESTIONS))
            try:
                http.post(f"{url}{CHAT}", json={**QUESTIONS[name], "stream": chance.random() < 0.5})
            except (httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError):
                broken.append(name)
