"""A fault at every seam: its request ends with a proper error or unharmed, and the next one is right."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tests.support.protocols import PROTOCOLS, SEEING, Messages, Protocol
from tests.support.running import Running
from vllm_mlx.cache import snapshot
from vllm_mlx.cache.tree import MemoryAwarePrefixCache
from vllm_mlx.cli.remote import events_of
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
from .watched import engine_served

HI = "Tell me something that is long enough to be kept, please. " * 4
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GUIDED: Any = {"guided_json": SCHEMA, "chat_template_kwargs": {"enable_thinking": False}}
CHAT = PROTOCOLS["chat"]


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


@pytest.fixture(scope="module")
def text_server(checkpoint: Any) -> Iterator[Running]:
    with engine_served(checkpoint("qwen3"), max_model_len=1024) as running:
        yield running


@pytest.fixture(scope="module")
def image_server(checkpoint: Any) -> Iterator[Running]:
    with engine_served(checkpoint("vision:qwen3_vl"), max_model_len=1024) as running:
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


def ask(server: Running, protocol: Protocol, body: Any, *, stream: bool = False) -> tuple[int, str]:
    with server.http() as client:
        answer = client.post(protocol.path, json={**body, "stream": stream})
        return answer.status_code, answer.text


def check_error(protocol: Protocol, status: int, text: str, *, stream: bool) -> None:
    """In the protocol's own words, in the body or as the last event."""
    if not stream or status != 200:
        assert status >= 500
        told = json.loads(text)
    else:
        *_, told = events_of(text.splitlines())
    error = protocol.error(told)
    assert error["message"] and ("response" not in told or told["type"] == "response.failed")
    kind = error["code"] if "response" in told else error["type"]
    assert kind == ("api_error" if isinstance(protocol, Messages) else "server_error")


def seams_and_protocols() -> Iterator[Any]:
    """Every run has each seam with one protocol, and one of them with all."""
    for name, seam in SEAMS.items():
        for number, protocol in enumerate(SEEING if not seam.guided else ["chat"]):
            is_usual = not number or name == "forward of a reply"
            yield pytest.param(name, protocol, marks=() if is_usual else pytest.mark.full)


@pytest.mark.parametrize(("name", "spoken"), seams_and_protocols())
def test_a_fault_ends_its_own_request_and_the_next_is_right(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, spoken: str
) -> None:
    seam, protocol = SEAMS[name], PROTOCOLS[spoken]
    server = request.getfixturevalue("image_server" if seam.shows else "text_server")
    shown: Any = [protocol.image_part(PICTURE)] if seam.shows else HI
    body = protocol.body(shown, temperature=0, **(GUIDED if seam.guided else {}))

    def said(text: str) -> Any:
        return protocol.content(json.loads(text))

    expected = said(ask(server, protocol, body)[1])
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
            status, text = ask(server, protocol, body, stream=stream)
            assert happened.wait(60), "the seam was not touched"
        if not seam.harmless:
            check_error(protocol, status, text, stream=stream)
        elif not stream:
            assert (status, said(text)) == (200, expected)
        else:
            assert status == 200 and "error" not in text.replace('"error":null', "")
        assert said(ask(server, protocol, body)[1]) == expected
    with server.http() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/status").json()["num_running"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_write_that_fails_leaves_no_row(text_server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    server = text_server
    body = CHAT.body(HI, temperature=0)
    expected = CHAT.content(json.loads(ask(server, CHAT, body)[1]))
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
            client.post(CHAT.path, json={**body, "stream": stream})
        except Exception as error:
            assert "RemoteProtocolError" in type(error).__name__ or "ReadError" in type(error).__name__
    assert len(num_sent) >= 2
    assert CHAT.content(json.loads(ask(server, CHAT, body)[1])) == expected
    with server.http() as client:
        assert client.get("/v1/status").json()["num_running"] == 0
