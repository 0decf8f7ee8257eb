"""Workload set `embeddings`: texts of unlike lengths, here and on mlx-vlm's server, in requests of 64."""

import contextlib
import json
import random
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.served import BenchmarkError, free_port, our_command, running
from tests.support.encoders import make_encoder

from .figures import OURS, Aim, Figure

THEIRS = "mlx-vlm server"
_BATCH, _NUM_REQUESTS, _CLIENTS = 64, 2, 2
_WORDS = "the quick brown fox jumps over a lazy dog while it rains in spring".split()  # noqa: SIM905


def write_tiny(folder: Path, _: str) -> Path:
    return make_encoder(folder, "bert", num_hidden_layers=6, intermediate_size=512)


@dataclass(frozen=True, slots=True)
class TextLoad:
    """One server, which gets the same texts as the other one."""

    port: int
    model: str

    def texts_per_s(self) -> float:
        rng = random.Random(5)
        lengths = [min(70, int(rng.lognormvariate(3.0, 0.8)) + 1) for _ in range(_BATCH * _NUM_REQUESTS)]
        texts = [" ".join(rng.choices(_WORDS, k=length)) for length in lengths]
        batches = [texts[at : at + _BATCH] for at in range(0, len(texts), _BATCH)]
        start = time.perf_counter()
        with ThreadPoolExecutor(_CLIENTS) as clients:
            num_vectors = sum(clients.map(partial(_encode, self), batches))
        if num_vectors != len(texts):
            raise BenchmarkError(f"{num_vectors} vectors of {len(texts)} texts came.")
        return num_vectors / (time.perf_counter() - start)


def _encode(load: TextLoad, texts: list[str]) -> int:
    body = json.dumps({"model": load.model, "input": texts}).encode()
    url, headers = f"http://127.0.0.1:{load.port}/v1/embeddings", {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        return len(json.load(reply)["data"])


@contextlib.contextmanager
def prepared(model: Path) -> Iterator[list[Figure]]:
    """Yield the figures of this set, measurable while the block runs."""
    ours, theirs = free_port(), free_port()
    command = [sys.executable, "-m", "mlx_vlm.server", "--embedding-model", str(model), "--port", str(theirs)]
    with running(our_command(model, ours), ours), running(command, theirs):
        loads = {OURS: TextLoad(ours, "default_model"), THEIRS: TextLoad(theirs, str(model))}
        measures = {subject: load.texts_per_s for subject, load in loads.items()}
        yield [Figure("texts", "texts/s", measures, (Aim(bound=0.95, at_least=True, against=THEIRS),))]
