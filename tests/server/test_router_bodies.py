"""Bodies as SMG 1.13.0, a router, forwards them: recorded between the router and a server, beside what was sent to it.

`docs/scaling.md` says what the router changes. These tests need no router.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.running import Running, serving
from vllm_mlx import __version__
from vllm_mlx.core.request import Request
from vllm_mlx.server.request_log import UNKNOWN_HEADER

from .fakes import FakeEngine

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "router_bodies.json").read_text("utf-8"))
REPLIED = [row for row in RECORDED if not row["sent"].get("priority")]
RESPONSES = "/v1/responses"
OF_ROUTER = {"temperature": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # where the client sent none
OPTIONS = {"served_model_names": ("demo",)}


def decoded(server: Running, http: httpx.Client, path: str, body: Any) -> Request:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert UNKNOWN_HEADER not in reply.headers
    engine = server.engine
    request: Request = (engine.counted if "count_tokens" in path else engine.requests)[-1]
    return replace(request, request_id="", arrived_s=None)


@pytest.mark.parametrize("row", REPLIED, ids=lambda row: row["path"])
def test_a_forwarded_body_asks_for_what_the_client_asked_for(
    server: Running, http: httpx.Client, row: dict[str, Any]
) -> None:
    sent, forwarded = (decoded(server, http, row["path"], row[form]) for form in ("sent", "forwarded"))
    if row["path"] == RESPONSES:
        given = {name: value for name in OF_ROUTER if (value := getattr(sent.sampling, name)) is not None}
        sent = replace(sent, sampling=replace(sent.sampling, **{**OF_ROUTER, **given}))
    assert forwarded == sent


def test_values_that_would_change_the_reply_are_not_ignored(http: httpx.Client) -> None:
    [row] = [row for row in RECORDED if row["sent"].get("priority")]
    refused = http.post(row["path"], json=row["forwarded"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    for name, value in {"top_k": -2, "min_p": 2.0, "repetition_penalty": 0.0, "priority": False}.items():
        refused = http.post(RESPONSES, json={"input": "hi", name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_router_learns_who_serves(http: httpx.Client) -> None:
    """The router takes a server with `/version` for vLLM, and reads its load from `/metrics`."""
    assert http.get("/version").json() == {"version": __version__}
    assert [http.get(path).status_code for path in ("/v1/loads", "/loads", "/server_info")] == [404] * 3
    model = http.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("demo", 512)


def test_a_response_of_another_server_is_not_found_and_the_error_says_what_to_do(http: httpx.Client) -> None:
    with serving(FakeEngine(), served_model_names=("demo",)) as other, other.http() as elsewhere:
        first = elsewhere.post(RESPONSES, json={"input": "hi"}).json()["id"]
        lost = http.post(RESPONSES, json={"input": "and?", "previous_response_id": first})
    error = lost.json()["error"]
    assert (lost.status_code, error["code"]) == (400, "previous_response_not_found")
    assert first in error["message"] and "complete input" in error["message"] and "scaling.md" in error["message"]


def test_a_conversation_with_a_gap_is_told_apart(http: httpx.Client) -> None:
    first = http.post(RESPONSES, json={"input": "hi"}).json()["id"]
    second = http.post(RESPONSES, json={"input": "and?", "previous_response_id": first}).json()["id"]
    http.delete(f"{RESPONSES}/{first}")
    lost = http.post(RESPONSES, json={"input": "so?", "previous_response_id": second})
    assert lost.status_code == 400 and "An earlier part" in lost.json()["error"]["message"]
