"""A fault at every seam: its request ends with a proper error or unharmed, and the next one is right."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tests.support.running import Running, serving
from vllm_mlx.cache import snapshot
from vllm_mlx.cache.tree import MemoryAwarePrefixCache
from vllm_mlx.cli.remote import events_of
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.formats.pipeline import OutputPipeline
from vllm_mlx.formats.tokenizer import Detokenizer, Tokenizer
from vllm_mlx.media.vision import VisionProcessor
from vllm_mlx.prompt.processor import RequestProcessor
from vllm_mlx.runner import model as runner_model
from vllm_mlx.runner.model import TextModel
from vllm_mlx.runner.row_constraint import RowConstraint
from vllm_mlx.runner.runner import Runner
from vllm_mlx.runner.sampler import Sampler

from ..media.samples import corners, encode
from .test_images import data_url

HI: Any = [{"role": "user", "content": "Tell me something that is long enough to be kept, please. " * 4}]
CHAT: Any = {"model": "tiny", "messages": HI, "max_tokens": 8, "temperature": 0}
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GUIDED: Any = {**CHAT, "guided_json": SCHEMA, "chat_template_kwargs": {"enable_thinking": False}}
RESPONSE: Any = {"model": "tiny", "input": HI, "max_output_tokens": 8, "temperature": 0}
BODIES: Any = {"/v1/chat/completions": CHAT, "/v1/messages": CHAT, "/v1/responses": RESPONSE}


@dataclass(frozen=True)
class Seam:
    owner: Any
    name: str
    harmless: bool = False  # the request itself does not need it
    guided: bool = False
    shows: bool = False  # a picture, to a model that sees
    after: int = 0  # calls that go well


SEAMS = {
    "forward of a prompt": Seam(TextModel, "prefill"),
    "forward of a reply": Seam(TextModel, "decode", after=2),
    "sampler": Seam(Sampler, "sample", after=2),
    "step as a whole": Seam(Runner, "decode", after=2),
    "grammar": Seam(RowConstraint, "fill", guided=True, after=1),
    "look-up": Seam(MemoryAwarePrefixCache, "match", harmless=True),
    "snapshot": Seam(snapshot, "capture", harmless=True),
    "insert": Seam(MemoryAwarePrefixCache, "insert", harmless=True),
    "restore": Seam(snapshot, "restore", harmless=True),
    "vision tower": Seam(runner_model, "encode", shows=True),
    "image processor": Seam(VisionProcessor, "render_again", shows=True),
    "rendered media": Seam(VisionProcessor, "recall", shows=True),
    "template": Seam(Tokenizer, "apply_chat_template"),
    "tokenizer": Seam(Tokenizer, "encoding"),
    "detokenizer": Seam(Detokenizer, "feed", after=2),
    "end of the reply": Seam(OutputPipeline, "finish"),
    "reply memory": Seam(RequestProcessor, "remember", harmless=True),
    "next turn": Seam(RequestProcessor, "kept_tokens", harmless=True),
}


PICTURE = data_url(encode(corners()))
PART: Any = {"type": "image_url", "image_url": {"url": PICTURE}}
BLOCK: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]},
}
ITEM: Any = {"type": "input_image", "image_url": PICTURE}
SHOWN: Any = {
    "/v1/chat/completions": {**CHAT, "messages": [{"role": "user", "content": [PART]}]},
    "/v1/messages": {**CHAT, "messages": [{"role": "user", "content": [BLOCK]}]},
    "/v1/responses": {**RESPONSE, "input": [{"role": "user", "content": [ITEM]}]},
}


@contextmanager
def served(path: Path) -> Iterator[Running]:
    config = EngineConfig(model=str(path), max_model_len=1024, memory_budget_bytes=2 << 30)
    with serving(start_engine(config)) as running:
        yield running


@pytest.fixture(scope="module")
def text_server(checkpoint: Any) -> Iterator[Running]:
    with served(checkpoint("qwen3")) as running:
        yield running


@pytest.fixture(scope="module")
def image_server(checkpoint: Any) -> Iterator[Running]:
    with served(checkpoint("vision:qwen3_vl")) as running:
        yield running


def break_once(monkeypatch: pytest.MonkeyPatch, seam: Seam) -> threading.Event:
    """The event is set when the fault has happened."""
    works, happened, calls = getattr(seam.owner, seam.name), threading.Event(), []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > seam.after and not happened.is_set():
            happened.set()
            raise RuntimeError("injected fault")
        return works(*args, **kwargs)

    monkeypatch.setattr(seam.owner, seam.name, broken)
    return happened


def wait_for_afterthoughts(server: Running) -> None:
    """The last reply is being thought over on two threads: when both are here, they are done with it."""
    barrier = threading.Barrier(3, timeout=120)
    for _ in range(2):
        server.engine.pool.submit(barrier.wait)
    barrier.wait()


def ask(server: Running, path: str, body: Any, *, stream: bool = False) -> tuple[int, str]:
    with server.http() as client:
        answer = client.post(path, json={**body, "stream": stream})
        return answer.status_code, answer.text


def said(reply: str) -> Any:
    """What of a whole reply does not differ from one request to the next."""
    found = json.loads(reply)
    if "choices" in found:
        return found["choices"]
    return found["content"] if "content" in found else [item.get("content") for item in found["output"]]


def check_error(path: str, status: int, text: str, *, stream: bool) -> None:
    """In the protocol's own words, in the body or as the last event."""
    if not stream or status != 200:
        assert status >= 500
        error = json.loads(text)
    else:
        *_, error = events_of(text.splitlines())
    if path == "/v1/messages":
        assert error["type"] == "error" and error["error"]["type"] == "api_error"
    elif path == "/v1/responses" and stream and status == 200:
        assert error["type"] == "response.failed" and error["response"]["error"]["code"] == "server_error"
    else:
        assert error["error"]["type"] == "server_error" and error["error"]["message"]


def seams_and_paths() -> Iterator[Any]:
    """Every run has each seam with one protocol, and one of them with all."""
    for name, seam in SEAMS.items():
        for number, path in enumerate(BODIES if not seam.guided else ["/v1/chat/completions"]):
            is_usual = not number or name == "forward of a reply"
            yield pytest.param(name, path, marks=() if is_usual else pytest.mark.full)


@pytest.mark.parametrize(("name", "path"), seams_and_paths())
def test_a_fault_ends_its_own_request_and_the_next_is_right(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    seam = SEAMS[name]
    server = request.getfixturevalue("image_server" if seam.shows else "text_server")
    body = GUIDED if seam.guided else (SHOWN if seam.shows else BODIES)[path]
    expected = said(ask(server, path, body)[1])
    for stream in (False, True):
        if name in (
            "forward of a prompt",
            "snapshot",
            "insert",
            "vision tower",
            "image processor",
        ):  # with all of it cached, nothing would be done
            with server.http() as client:
                client.delete("/v1/cache")
        wait_for_afterthoughts(server)
        with monkeypatch.context() as patch:
            happened = break_once(patch, seam)
            status, text = ask(server, path, body, stream=stream)
            assert happened.wait(60), "the seam was not touched"
        if not seam.harmless:
            check_error(path, status, text, stream=stream)
        elif not stream:
            assert (status, said(text)) == (200, expected)
        else:
            assert status == 200 and "error" not in text.replace('"error":null', "")
        assert said(ask(server, path, body)[1]) == expected
    with server.http() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/status").json()["num_running"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_write_that_fails_leaves_no_row(text_server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    server = text_server
    path = "/v1/chat/completions"
    expected = said(ask(server, path, CHAT)[1])
    send = RequestResponseCycle.send
    num_sent = []

    async def failing(self: Any, message: Any) -> None:
        num_sent.append(1)
        if len(num_sent) == 2:
            raise OSError("injected fault")
        await send(self, message)

    with monkeypatch.context() as patch, server.http() as client:
        patch.setattr(RequestResponseCycle, "send", failing)
        try:
            client.post(path, json={**CHAT, "stream": stream})
        except Exception as error:
            assert "RemoteProtocolError" in type(error).__name__ or "ReadError" in type(error).__name__
    assert len(num_sent) >= 2
    assert said(ask(server, path, CHAT)[1]) == expected
    with server.http() as client:
        assert client.get("/v1/status").json()["num_running"] == 0
