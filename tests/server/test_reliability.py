"""An engine that hangs, and one that dies: what `/health` says, and how the process ends."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.running import eventually, serving, start_python
from vllm_mlx.cli.terminal import ExitCode
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.runner.runner import Runner

HI: Any = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 4, "ignore_eos": True}


def test_a_step_that_hangs_is_told_with_its_place_and_one_that_ends_is_forgiven(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(EngineConfig(model=str(checkpoint("qwen3")), max_model_len=256))
    hangs, hang, decode = threading.Event(), threading.Event(), Runner.decode

    def hanging(self: Runner, plan: Any) -> Any:
        hangs.set()
        hang.wait(60)
        return decode(self, plan)

    with serving(engine) as server, server.http() as client:
        expected = client.post("/v1/chat/completions", json=HI).json()["choices"]
        monkeypatch.setattr(Runner, "decode", hanging)
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", json=HI)))
        asking.start()
        assert hangs.wait(60)
        with server.http() as other:
            with monkeypatch.context() as impatient:
                impatient.setattr(engine._monitor._watchdog, "_limit_s", 0.1)
                eventually(lambda: other.get("/health").status_code == 503)
                health = other.get("/health").json()
                refused = other.post("/v1/chat/completions", json=HI)
            assert health["status"] == "error" and "in one step for" in health["error"]
            assert "in step (engine.py:" in health["error"] or "decode" in health["error"]
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            hang.set()
            asking.join(60)
            eventually(lambda: other.get("/health").status_code == 200)
            assert [answer.json()["choices"] for answer in answers] == [expected]
            assert other.post("/v1/chat/completions", json=HI).json()["choices"] == expected
    assert caplog.text.count("The engine hangs in a step") == 1


DYING = """
import sys
from vllm_mlx.cli.main import main
from vllm_mlx.engine.engine import Engine

def die(self, deliver):
    raise SystemError("the device is gone")

Engine.step = die
sys.argv = ["vllm-mlx", "serve", {path!r}, "--port", "0"]
main()
"""


def test_a_process_whose_engine_died_asks_to_be_started_again(checkpoint: Callable[..., Path]) -> None:
    process = start_python(DYING.format(path=str(checkpoint("qwen3"))))
    assert process.stdout is not None
    try:
        printed = ""
        while "Ctrl-C" not in printed:
            printed += process.stdout.readline()
        url = re.findall(r"http://127.0.0.1:\d+", printed)[0]
        answer = httpx.post(f"{url}/v1/chat/completions", json=HI, trust_env=False, timeout=60)
        assert answer.status_code == 503 and "the device is gone" in answer.json()["error"]["message"]
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == ExitCode.RESTART == 75
    assert "The engine has stopped: SystemError: the device is gone." in err.splitlines()[-1]
