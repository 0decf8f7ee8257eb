"""Images through the server: those of every protocol, and what is refused before anything is generated."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.protocols import PROTOCOLS, SEEING
from tests.support.running import Running, serving
from vllm_mlx.core.config import MediaConfig

from ..media.hosts import HERE, Host, Names, drip, host, image, redirect, reply, web
from ..media.samples import (
    BLUE,
    GREEN,
    RED,
    bomb,
    corners,
    encode,
    turned,
)
from .image_engine import ImageEngine

PNG = encode(corners())
JSON = {"content-type": "application/json"}  # written by the standard library, which keeps half a surrogate pair
LIMITS = {
    "max_images": 4,
    "max_image_bytes": 200_000,
    "max_image_pixels": 1_000_000,
    "max_request_pixels": 1_500_000,
    "media_timeout_s": 0.4,
    "max_media_redirects": 2,
}


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def pictures() -> Iterator[Host]:
    with host() as running:
        running.routes |= {
            "/good.png": image(PNG),
            "/slow": drip(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
            "/page": reply(b"<html></html>", "Content-Type: text/html"),
            "/gone": reply(b"", status="404 Not Found"),
            "/loop": redirect("/loop"),
            "/inside": redirect("http://inside.test/"),
        }
        yield running


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "good.png").write_bytes(PNG)
    (folder / "out.png").symlink_to("/etc/passwd")
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Running]:
    config = {**LIMITS, "media_root": str(root)}
    names = Names({"169.254.169.254": "169.254.169.254", "pictures.test": HERE, "inside.test": "192.168.0.1"})
    with serving(ImageEngine(media=MediaConfig(**config), web=web(names, **config))) as running:
        yield running


def showing(name: str, *sources: str) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request with these images."""
    protocol = PROTOCOLS[name]
    return protocol.path, protocol.body([protocol.image_part(source) for source in sources])


BAD: dict[str, str] = {  # `tests/media` has many more of each kind
    "empty": "data:image/png;base64,",
    "not base64": "data:image/png;base64,@@@@",
    "svg in words": "data:image/svg+xml,%3Csvg%20xmlns='http://www.w3.org/2000/svg'/%3E",
    "video": data_url(b"\0\0\0\x18ftypisom\0\0\0\0", "video/mp4"),
    "png cut": data_url(PNG[:-30]),
    "bomb": data_url(bomb(3000)),
    "too many bytes": data_url(encode(Image.effect_noise((600, 600), 90).convert("RGB"))),
    "bare base64": base64.b64encode(PNG).decode(),
    "relative": "a.png",
    "half a character": "\ud83d",
    "half a character in an address": "http://pictures.test/\ud83d",
    "half a character in base64": "data:image/png;base64,\ud83dAAA",
    **{path[1:]: f"http://pictures.test:PORT{path}" for path in ("/slow", "/page", "/gone", "/loop", "/inside")},
    "unknown host": "http://none.test/a.png",
    "metadata address": "http://169.254.169.254/latest/meta-data/",
    "password": "http://user:password@pictures.test:PORT/good.png",
    "closed port": "http://pictures.test:1/",
    "a long one": "http://pictures.test/" + "a" * 80_000,
    "a file by URL": "file:///etc/passwd",
    "a link out": "ROOT/out.png",
    "another machine's file": "file://server/share/a.png",
}  # fmt: skip


def refused(name: str, answer: httpx.Response) -> str:
    """The message of a refusal in the protocol's own envelope."""
    protocol = PROTOCOLS[name]
    error = protocol.refusal(answer)
    if name != "messages":
        assert error["code"] == "invalid_image" and error["param"] in (protocol.list_name, protocol.image_place)
    return str(error["message"])


@pytest.mark.parametrize("protocol", SEEING)
def test_bad_images_are_refused_and_the_server_is_well(
    http: httpx.Client, pictures: Host, root: Path, protocol: str
) -> None:
    for name, source in BAD.items() if protocol == "chat" else [*BAD.items()][::6]:
        source = source.replace("PORT", str(pictures.port)).replace("ROOT", str(root))
        path, body = showing(protocol, source)
        message = refused(protocol, http.post(path, content=json.dumps(body), headers=JSON))
        assert message.startswith(f"Image 1 of this request (`{PROTOCOLS[protocol].image_place}`, "), name
        assert len(message) < 500, name
    path, body = showing(protocol, f"http://pictures.test:{pictures.port}/good.png")
    assert http.post(path, json=body).status_code == 200


@pytest.mark.parametrize("protocol", SEEING)
def test_too_many_images_or_pixels_are_refused(http: httpx.Client, protocol: str) -> None:
    large = [data_url(encode(Image.new("1", (900, 900), number))) for number in range(2)]
    for sources, words in ([[data_url(PNG)] * 5, "--limit-mm-per-prompt"], [large, "--max-request-pixels"]):
        path, body = showing(protocol, *sources)
        assert words in refused(protocol, http.post(path, json=body))


def test_good_images_of_every_kind(server: Running, pictures: Host, root: Path) -> None:
    sources = [
        data_url(PNG),
        f"http://pictures.test:{pictures.port}/good.png",
        f"{root}/good.png",
        f"file://{root}/good.png",
    ]
    for name in SEEING:
        path, body = showing(name, *sources)
        with server.http() as http:
            assert http.post(path, json=body).status_code == 200
        assert len(server.engine.seen[-1]) == 4
        assert len({picture.pixels.tobytes() for picture in server.engine.seen[-1]}) == 1


def colours(server: Running) -> list[tuple[int, ...]]:
    return [tuple(picture.pixels[0, 0]) for picture in server.engine.seen[-1]]


RGB = [encode(Image.new("RGB", (4, 4), colour)) for colour in (RED, GREEN, BLUE)]
A, B, C = (base64.b64encode(data).decode() for data in RGB)


def test_images_stand_where_the_conversation_has_them(server: Running, http: httpx.Client) -> None:
    """In user messages, in tool results, several in one; for each protocol."""
    block = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": data}} for data in (A, B, C)
    ]
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    anthropic = [
        {"role": "user", "content": [block[0], {"type": "text", "text": "and"}, block[1]]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block[2]]}]},
    ]
    url = [f"data:image/png;base64,{data}" for data in (A, B, C)]
    part = [{"type": "image_url", "image_url": {"url": each}} for each in url]
    function = {"name": "look", "arguments": "{}"}
    openai = [
        {"role": "user", "content": [part[0], {"type": "text", "text": "and"}, part[1]]},
        {"role": "assistant", "tool_calls": [{"id": "t", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "t", "content": [part[2]]},
    ]
    item = [{"type": "input_image", "image_url": each, "detail": "high"} for each in url]
    given = [
        {"role": "user", "content": [item[0], {"type": "input_text", "text": "and"}, item[1]]},
        {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t", "output": [item[2]]},
    ]
    for path, body in (
        ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": anthropic}),
        ("/v1/chat/completions", {"messages": openai}),
        ("/v1/responses", {"input": given}),
    ):
        assert http.post(path, json=body).status_code == 200
        assert colours(server) == [RED, GREEN, BLUE]


def test_a_photograph_stands_upright(server: Running, http: httpx.Client) -> None:
    path, body = showing("chat", data_url(turned(6), "image/jpeg"))
    assert http.post(path, json=body).status_code == 200
    assert (server.engine.seen[-1][0].width, server.engine.seen[-1][0].height) == (48, 64)
