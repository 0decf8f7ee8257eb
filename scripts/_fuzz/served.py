"""A checkpoint served for fuzzing: rounds of requests to every route."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.running import serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine

from .routes import Finding, fuzz_operation, operations


@contextmanager
def fuzz_server(model: str, num_examples: int) -> Iterator[Callable[[int, float], list[str]]]:
    config = EngineConfig(model=model, memory_budget_bytes=2 << 30, max_model_len=2048, max_request_s=20)
    with serving(start_engine(config), served_model_names=("tiny",)) as server:

        def fuzz(number: int, until_s: float) -> list[str]:
            findings = []
            for label, operation in operations(server.url):
                if time.monotonic() > until_s:
                    break
                try:
                    fuzz_operation(operation, server.url, number=number, num_examples=num_examples)
                except Finding as finding:
                    findings.append(f"{label} (round {number}): {finding}")
            return findings

        yield fuzz
