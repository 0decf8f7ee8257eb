"""An engine that hangs, and one that dies: what `/health` says, and how the process ends."""

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.running import eventually, serving, slowly, start_python
from vllm_mlx.cli.terminal import ExitCode
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.runner.runner import Runner

HI: Any = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 4, "ignore_eos": True}


def test_a_step_that_hangs_is_told_with_its_place_and_one_that_ends_is_forgiven(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(EngineConfig(model=str(checkpoint("qwen3")), max_model_len=256, idle_prefill="off"))
    hangs, hang, decode = threading.Event(), threading.Event(), Runner.decode

    def hanging(self: Runner, plan: Any) -> Any:
        hangs.set()
        hang.wait(60)
        return decode(self, plan)

    with serving(engine) as server, server.http() as client:
        expected = client.post("/v1/chat/completions", json=HI).json()["choices"]
        eventually(lambda: not asyncio.run(engine.ask(lambda loaded: loaded.has_work)))  # a step may follow a reply
        monkeypatch.setattr(Runner, "decode", hanging)
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", json=HI)))
        asking.start()
        assert hangs.wait(60)
        with server.http() as other:
            with monkeypatch.context() as impatient:
                impatient.setattr(engine._monitor, "_watchdog_s", 0.1)
                eventually(lambda: other.get("/health").status_code == 503)
                health = other.get("/health").json()
                refused = other.post("/v1/chat/completions", json=HI)
            assert health["status"] == "error" and "in one step for" in health["error"]
            assert "step (engine.py:" in health["error"] or "decode" in health["error"]
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
from vllm_mlx.engine import loading
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.runner.runner import Runner

loading.warm_up = lambda model, **options: None

def die(self, *args):
    raise {error}

{seam} = die
sys.argv = ["vllm-mlx", "serve", {path!r}, "--port", "0"]
main()
"""


GONE = "The engine has stopped: SystemError: the device is gone."
FAILED = "The GPU failed 3 times in a row, so that only a restart of the server helps: [METAL] Command buffer"


@pytest.mark.parametrize(
    ("seam", "error", "words"),
    [
        ("LLMEngine.step", 'SystemError("the device is gone")', GONE),
        pytest.param(  # with every run: such faults in a server within this process, as below
            "Runner.prefill",
            'RuntimeError("[METAL] Command buffer execution failed: Ignored (00000004).")',
            FAILED,
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_process_whose_engine_died_asks_to_be_started_again(
    checkpoint: Callable[..., Path], seam: str, error: str, words: str
) -> None:
    process = start_python(DYING.format(path=str(checkpoint("qwen3")), seam=seam, error=error))
    assert process.stdout is not None
    try:
        printed = ""
        while "Ctrl-C" not in printed:
            line = process.stdout.readline()
            assert line, "it ended before it was ready"
            printed += line
        url = re.findall(r"http://127.0.0.1:\d+", printed)[0]
        answer = httpx.post(f"{url}/v1/chat/completions", json=HI, trust_env=False, timeout=60)
        assert answer.status_code == 503 and words in answer.json()["error"]["message"]
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == ExitCode.RESTART == 75
    assert words in err.splitlines()[-1]


def test_gpu_faults_in_a_row_end_every_open_request_in_its_envelope_and_new_ones_are_refused(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(EngineConfig(model=str(checkpoint("qwen3")), max_model_len=4096))

    def failing(self: Runner) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Impacting Interactivity (0000000e).")

    long: Any = {**HI, "max_tokens": 4000}
    with serving(engine) as server, slowly(server), server.http() as client:
        stream = client.stream("POST", "/v1/chat/completions", json={**long, "stream": True})
        with stream as chat, server.http().stream("POST", "/v1/messages", json={**long, "stream": True}) as message:
            lines = [response.iter_lines() for response in (chat, message)]
            for read in lines:
                assert next(read)
            monkeypatch.setattr(Runner, "_check_device", failing)
            ends = ["\n".join(list(read)[-8:]) for read in lines]
        assert '"code":"engine_dead"' in ends[0].replace(" ", "") and "The GPU failed 3 times" in ends[0]
        assert "event: error" in ends[1] and '"type":"api_error"' in ends[1].replace(" ", "")
        health = client.get("/health")
        assert health.status_code == 503 and "Impacting Interactivity" in health.json()["error"]
        refused = client.post("/v1/chat/completions", json=HI)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
