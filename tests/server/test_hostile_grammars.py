"""A grammar that is slow to step is refused over HTTP, and others are served; tests/server/test_harm.py has more."""

from typing import Any

import pytest

from tests.support.running import Running
from vllm_mlx.runner import row_constraint

HI: Any = [{"role": "user", "content": "hi"}]
OFF: Any = {"chat_template_kwargs": {"enable_thinking": False}}
ANN, BEN = ({"Authorization": f"Bearer {key}"} for key in ("ann", "ben"))
MODEL, SETTINGS, OPTIONS = "qwen3", {"max_model_len": 2048}, {"api_keys": ("ann", "ben")}


def test_a_grammar_that_was_too_slow_is_refused_and_others_are_served(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every grammar is too slow here, because there is no allowance."""
    monkeypatch.setattr(row_constraint, "START_S", 0.0)
    monkeypatch.setattr(row_constraint, "TOKEN_S", 0.0)
    guided = {"messages": HI, "max_tokens": 20, "guided_regex": "[a-z]{20}", **OFF}
    plain = {"messages": HI, "max_tokens": 2, **OFF}
    with server.http(headers=ANN) as ann, server.http(headers=BEN) as ben:
        for client in (ann, ben):  # the first reply of a key begins
            assert "ended" in client.post("/v1/chat/completions", json=guided).json()["error"]["message"]
        for stream in (False, True):
            reply = ann.post("/v1/chat/completions", json={**guided, "stream": stream})
            assert reply.status_code == 400 and reply.json()["error"]["code"] == "grammar_limit"
            assert "too slow" in reply.json()["error"]["message"]
        assert ann.post("/v1/chat/completions", json=plain).status_code == 200
        monkeypatch.setattr(row_constraint, "START_S", 1.0)
        assert ann.post("/v1/chat/completions", json={**guided, "guided_regex": "[a-z]{19}"}).status_code == 200
