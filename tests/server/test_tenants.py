"""Holders of different keys on one engine: nobody ends, clears or reads what is another's."""

import json
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest

from tests.support.running import Running, eventually, slowly
from vllm_mlx.engine.monitoring.schema import EngineStatus
from vllm_mlx.server.status import Recent
from vllm_mlx.util.tenants import APIKey

from .documents import documented_reply
from .watched import engine_served

ASK: Any = {"input": "Tell me something that is long enough to be kept, please. " * 4, "max_output_tokens": 4}
NOTHING: Any = {"models": [], "requests": [], "model": "m", "model_facts": {"model": "m"}}
ENDLESS: Any = {
    "messages": [{"role": "user", "content": "Go."}],
    "max_tokens": 3000,
    "ignore_eos": True,
    "stream": True,
}
MODEL, SETTINGS, OPTIONS = "qwen3", {"max_model_len": 4096}, {"api_keys": ("ann", "ben")}


@pytest.fixture
def ann(server: Running) -> Iterator[httpx.Client]:
    with server.http(headers={"x-api-key": "ann"}) as client:
        yield client


@pytest.fixture
def ben(server: Running) -> Iterator[httpx.Client]:
    with server.http(headers={"x-api-key": "ben"}) as client:
        yield client


def cached(client: httpx.Client) -> int:
    reply = client.post("/v1/responses", json=ASK).raise_for_status()
    return int(reply.json()["usage"]["input_tokens_details"]["cached_tokens"])


def test_a_holder_clears_what_is_cached_of_its_own_requests(ann: httpx.Client, ben: httpx.Client) -> None:
    assert (cached(ann), cached(ben)) == (0, 0)
    assert ben.delete("/v1/cache").json()["freed_bytes"] > 0
    assert cached(ann) > 0
    assert cached(ben) == 0


def test_a_holder_cancels_its_own_requests(server: Running, ann: httpx.Client, ben: httpx.Client) -> None:
    with slowly(server), ann.stream("POST", "/v1/chat/completions", json=ENDLESS) as running:
        lines = running.iter_lines()
        next(lines)
        [hidden] = ben.get("/v1/status").json()["requests"]
        assert hidden["request_id"] is hidden["client"] is None and hidden["max_tokens"] == ENDLESS["max_tokens"]
        with server.http(headers={"x-api-key": "ann"}) as beside:
            [request] = beside.get("/v1/status").json()["requests"]
            path = f"/v1/requests/{request['request_id']}/cancel"
            assert ben.post(path).status_code == 404
            assert beside.post(path).status_code == 200
        assert any("request_cancelled" in line for line in lines)
    eventually(lambda: ben.get("/v1/status").json()["num_running"] == 0)


def test_a_stored_response_is_its_holder_s(ann: httpx.Client, ben: httpx.Client) -> None:
    path = f"/v1/responses/{ann.post('/v1/responses', json=ASK).json()['id']}"
    followed = ben.post("/v1/responses", json={**ASK, "previous_response_id": path.rpartition("/")[2]})
    assert followed.json()["error"]["code"] == "previous_response_not_found"
    looks = [ben.get(path), ben.get(f"{path}/input_items"), ben.post(f"{path}/cancel"), ben.delete(path)]
    assert [look.status_code for look in looks] == [404] * 4
    assert ann.get(path).status_code == 200


def test_a_holder_sees_no_words_and_ids_of_another_s_requests(ann: httpx.Client, ben: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi."}]
    reply_id = ann.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2}).json()["id"]
    wrong: list[dict[str, Any]] = [
        {"messages": [{"role": "secret"}]},
        {"messages": messages, "model": "secret"},
        {"messages": messages, "secret": 1},
        {"messages": messages, "structured_outputs": {"grammar": "start: secret"}},
    ]
    for fields in wrong:
        assert ann.post("/v1/chat/completions", json=fields, headers={"x-request-id": "secret"}).status_code >= 400
    assert ann.get("/v1/responses/secret").status_code == 404
    own, others = ann.get("/v1/status"), ben.get("/v1/status")
    assert documented_reply(ben, "/v1/status")["last_errors"] == others.json()["last_errors"] != []
    with ben.stream("GET", "/v1/status/stream") as stream:
        event = next(stream.iter_lines())
    for text in (others.text, event, ben.get("/v1/status/history").text, ben.get("/v1/cache").text):
        assert "secret" not in text and reply_id not in text
    mine, theirs = own.json()["last_errors"][:5], others.json()["last_errors"][:5]
    assert all("secret" in error["message"] for error in mine)
    assert {error["request_id"] for error in mine[1:]} == {"secret"}
    assert [(error["status"], error["code"]) for error in mine] == [
        (error["status"], error["code"]) for error in theirs
    ]
    assert {error["client"] for error in theirs} == {None} and mine[0]["client"].startswith("python-httpx")
    assert {error["path"] for error in theirs} == {"/v1/…", "/v1/chat/completions"}
    assert own.json()["last_replies"][0]["request_id"] == reply_id
    assert all("tenant" not in entry for entry in (*mine, *theirs, *own.json()["last_replies"]))


def test_replies_to_another_s_requests_are_one_sum() -> None:
    reply: Any = {"request_id": "msg_1", "prompt_tokens": 7, "cached_tokens": 2, "completion_tokens": 3}
    recent, nothing = Recent(), cast(EngineStatus, NOTHING)
    for tenant in ("ann", "cat", "ben"):
        recent.add_reply(reply, tenant=tenant)
    scope: Any = {"state": {"tenant": "ben", "is_admin": False}}
    status = recent.status_for(scope, nothing)
    sums = {"num_replies": 2, "prompt_tokens": 14, "cached_tokens": 4, "completion_tokens": 6}
    assert (status["last_replies"], status["other_replies"]) == ([reply], sums)


def test_what_another_cached_and_was_told_is_one_sum_everywhere(ann: httpx.Client, ben: httpx.Client) -> None:
    for client in (ann, ben):
        client.delete("/v1/cache")
    ask = {"messages": [{"role": "user", "content": "Once upon a time there was a bear."}], "max_tokens": 2}
    assert ann.post("/v1/chat/completions", json=ask).status_code == 200
    eventually(lambda: bool(ann.get("/v1/cache").json()["data"]))
    own, seen = ann.get("/v1/cache").json(), ben.get("/v1/cache").json()
    assert documented_reply(ben, "/v1/cache")["others"] == seen["others"]
    num_bytes = sum(entry["segment_bytes"] + entry["state_bytes"] for entry in own["data"])
    num_tokens = sum(entry["end"] - entry["start"] for entry in own["data"])
    sums = {"num_entries": len(own["data"]), "num_tokens": num_tokens, "num_bytes": num_bytes}
    assert (seen["data"], seen["others"], own["others"]["num_entries"]) == ([], sums, 0) and num_tokens > 0
    theirs = own["data"][0]["last_used"]
    with ben.stream("GET", "/v1/status/stream") as stream:
        event = json.loads(next(stream.iter_lines()).removeprefix("data: "))
    mine = ann.get("/v1/status").json()["last_replies"]
    assert str(theirs) not in json.dumps(seen) and all(reply not in event["last_replies"] for reply in mine)
    assert event["other_replies"] == ben.get("/v1/status").json()["other_replies"]
    assert event["other_replies"]["prompt_tokens"] == sum(reply["prompt_tokens"] for reply in mine)


@pytest.mark.parametrize("state", [{"tenant": "ann", "is_admin": True}, {}])
def test_without_several_keys_everything_is_seen(state: Any) -> None:
    error: Any = {"request_id": "a", "message": "b", "path": "/v1/c"}
    recent, nothing = Recent(), cast(EngineStatus, NOTHING)
    recent.add_error(error, tenant=state.get("tenant", ""))
    recent.add_reply(error, tenant=state.get("tenant", ""))
    scope: Any = {"state": state, "client": ("192.0.2.1", 5)}
    status = recent.status_for(scope, nothing)
    assert status["last_errors"] == status["last_replies"] == [error] and not any(status["other_replies"].values())


def test_only_who_manages_the_server_sees_the_path_of_a_folder(checkpoint: Any) -> None:
    folder = checkpoint("qwen3")
    keys = (APIKey("ann", "a-secret"), APIKey("root", "r-secret", is_admin=True))
    with (
        engine_served(folder, options={"api_keys": keys}) as server,
        server.http(headers={"x-api-key": "a-secret"}) as ann,
        server.http(headers={"x-api-key": "r-secret"}) as root,
    ):
        [name] = {model["id"] for model in ann.get("/v1/models").json()["data"][:1]}
        for path in ("/v1/models", f"/v1/models/{name}", "/v1/status"):
            seen, all_of_it = ann.get(path).text, root.get(path).text
            assert str(folder.parent) not in seen and folder.name in seen
            assert str(folder) in all_of_it
