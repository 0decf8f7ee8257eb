"""Requests drawn from a server's own OpenAPI document, right ones and wrong ones. Knows no route by name."""

import contextlib
from collections.abc import Iterator
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok

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
    """`number` decides what is drawn. Raises Finding, with the smallest request that shows it."""

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

    with contextlib.suppress(Unsatisfiable):  # there is no wrong request to some routes
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
