"""Valid and invalid requests, drawn from the OpenAPI document of a server. It knows no route by name."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok

from tests.support.running import serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine

TIMEOUT_S = 60
_LEFT_OUT = ("/v1/status/stream",)  # it does not end


class Finding(AssertionError):
    """A request that the server did not handle."""


def operations(url: str) -> Iterator[tuple[str, object]]:
    document = requests.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json()
    schema = schemathesis.openapi.from_dict(document)
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        if operation.path not in _LEFT_OUT:
            yield operation.label, operation


def fuzz_operation(operation: object, url: str, *, number: int, num_examples: int) -> None:
    """Send requests that are drawn by `number`. Raises Finding with the smallest request that shows a fault."""

    @seed(number)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=_mode(number)))  # type: ignore[attr-defined]
    def check(case: Case[Any]) -> None:
        check_answer(case, url)

    with contextlib.suppress(Unsatisfiable):  # some routes have no invalid request
        check()


def check_answer(case: Case[Any], url: str) -> None:
    try:
        answer = case.call(base_url=url, timeout=TIMEOUT_S)
    except requests.Timeout as error:
        raise Finding(f"no answer to {case.as_curl_command()}") from error
    except (requests.RequestException, ValueError):
        return  # nothing that can be sent over HTTP
    if answer.status_code >= 500:
        raise Finding(f"{answer.status_code} to {case.as_curl_command()}: {answer.text[:500]}")
    is_json = answer.headers.get("content-type", [""])[0].startswith("application/json")
    if answer.status_code >= 400 and not (is_json and "error" in answer.json()):
        raise Finding(f"{answer.status_code} without an envelope to {case.as_curl_command()}: {answer.text[:500]}")


def _mode(number: int) -> GenerationMode:
    return GenerationMode.NEGATIVE if number % 3 == 2 else GenerationMode.POSITIVE


@contextlib.contextmanager
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
