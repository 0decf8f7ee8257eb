"""Images from the socket to a checkpoint that knows nothing: fetched once, refused at once, or not fetched."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.rows import row
from tests.support.running import Running
from tests.support.shapes import draw_shape
from vllm_mlx import LLM, MediaConfig
from vllm_mlx.cli.remote import events_of
from vllm_mlx.core.errors import InvalidImage

from ..media.hosts import HERE, Host, host, image, reply
from ..media.samples import encode
from .test_images import JSON, data_url
from .watched import engine_served

MEDIA = MediaConfig(max_image_bytes=2_000_000, max_image_pixels=2_000_000, allow_private_media=True)
MAX_MODEL_LEN = 256  # of the checkpoint that knows nothing


@pytest.fixture(scope="module")
def tiny(checkpoint: Callable[..., Path]) -> Iterator[Running]:
    with engine_served(checkpoint("vision:qwen3_vl"), max_model_len=MAX_MODEL_LEN, media=MEDIA) as running:
        yield running


@pytest.fixture
def pictures() -> Iterator[Host]:
    with host() as running:
        running.routes["/red.png"] = image(encode(draw_shape("red", "circle", 112)))
        yield running


def chat(*sources: str, **image_fields: Any) -> tuple[str, dict[str, Any]]:
    content = [{"type": "image_url", "image_url": {"url": source, **image_fields}} for source in sources]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}


def post(running: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    with running.http() as http:
        return http.post(path, content=json.dumps(body), headers=JSON)


def test_the_next_turn_neither_fetches_nor_computes_the_picture_again(tiny: Running, pictures: Host) -> None:
    url = pictures.url("/red.png", HERE)
    asked: Any = {"temperature": 0, "max_tokens": 8}
    first = post(tiny, "/v1/chat/completions", {"messages": conversation(url), **asked}).json()
    answer = first["choices"][0]["message"]["content"]
    second = post(tiny, "/v1/chat/completions", {"messages": conversation(url, answer), **asked}).json()
    assert pictures.paths() == ["/red.png"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    suffix = 12  # the end of the turn and the empty thought before a reply, which later turns do not contain
    assert cached >= first["usage"]["prompt_tokens"] - suffix > 16


def test_all_that_is_kept_of_pictures_is_within_the_budget(tiny: Running) -> None:
    with tiny.http() as http:
        status = http.get("/v1/status").json()
    memory, total = status["memory"], status["memory"].pop("total_bytes")
    assert sum(memory.values()) == total
    parts = tiny.engine.fronts[0].facts.memory
    assert memory["image_bytes"] == parts.encoder_inputs_bytes + parts.decoded_bytes + parts.rendered_bytes
    assert min(parts.encoder_inputs_bytes, parts.decoded_bytes, parts.rendered_bytes) > 0


KEPT_NOT = MediaConfig(media_cache_bytes=0, allow_private_media=True)  # pixels are never at hand


@pytest.fixture(scope="module")
def forgetful(checkpoint: Callable[..., Path]) -> Iterator[Running]:
    """Keeps no pixels, and knows nothing of what it sees."""
    with engine_served(checkpoint("vision:qwen3_vl"), media=KEPT_NOT) as running:
        yield running


def conversation(url: str, *answers: str) -> list[dict[str, Any]]:
    shown = {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is in this image?"},
            {"type": "image_url", "image_url": {"url": url}},
        ],
    }
    turns = [[{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}] for said in answers]
    return [shown, *(message for turn in turns for message in turn)]


def said(running: Running, messages: list[dict[str, Any]], **headers: str) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    with running.http() as http:
        reply = http.post("/v1/chat/completions", content=json.dumps(body), headers={**JSON, **headers})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def encoded(running: Running, **headers: str) -> int:
    with running.http() as http:
        return int(http.get("/v1/status", headers=headers).json()["images"]["encoded"])


def test_pixels_are_had_again_only_when_the_tower_has_to_run_again(forgetful: Running, pictures: Host) -> None:
    """Nothing of a known picture is fetched or decoded for a next turn; a cleared cache needs it once more."""
    url = pictures.url("/red.png", HERE)
    first = said(forgetful, conversation(url))
    later = said(forgetful, conversation(url, first))
    assert (pictures.paths(), encoded(forgetful)) == (["/red.png"], 1)
    clear_cache(forgetful)
    assert said(forgetful, conversation(url, first)) == later
    assert (pictures.paths(), encoded(forgetful)) == (["/red.png"] * 2, 2)


def clear_cache(running: Running) -> None:
    with running.http() as http:
        assert http.delete("/v1/cache").status_code == 200


def error_of(answer: httpx.Response, *, stream: bool) -> dict[str, Any]:
    """The error of a reply, or the one that ends a stream: its status was sent before the row began."""
    if not stream:
        assert answer.status_code == 400, answer.text
        return dict(answer.json()["error"])
    [error] = [event["error"] for event in events_of(answer.text.splitlines()) if "error" in event]
    return dict(error)


@pytest.mark.parametrize(
    ("gone", "stream"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.full),
        pytest.param(True, False, marks=pytest.mark.full),
    ],
)
def test_an_image_that_changes_at_its_address_while_its_row_waits_is_the_clients_error(
    forgetful: Running, pictures: Host, stream: bool, gone: bool
) -> None:
    """Its row waits for encoder inputs, which are made again from the file at the address."""
    clear_cache(forgetful)
    url = pictures.url("/red.png", HERE)
    first = said(forgetful, conversation(url))
    changed = reply(b"", status="404 Not Found") if gone else image(encode(draw_shape("blue", "star", 112)))
    pictures.routes["/red.png"] = changed
    clear_cache(forgetful)
    answer = post(forgetful, "/v1/chat/completions", {"messages": conversation(url), "stream": stream})
    error = error_of(answer, stream=stream)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_image")
    assert error["param"] == "messages[0].content[1].image_url"
    assert ("status 404" if gone else "has changed since") in error["message"]
    pictures.routes["/red.png"] = image(encode(draw_shape("red", "circle", 112)))
    assert said(forgetful, conversation(url)) == first, "the next request is served"


def test_the_holder_of_another_key_cannot_tell_that_a_picture_was_seen(
    checkpoint: Callable[..., Path], pictures: Host
) -> None:
    """By nothing that takes time: it is fetched, decoded and encoded anew."""
    url = pictures.url("/red.png", HERE)
    keys = {"api_keys": ("first", "second")}
    with engine_served(checkpoint("vision:qwen3_vl"), options=keys, media=MEDIA) as running:
        replies, runs = [], []
        for key in ("first", "second", "first", "second"):
            replies.append(said(running, conversation(url), authorization=f"Bearer {key}"))
            runs.append((len(pictures.requests), encoded(running, authorization=f"Bearer {key}")))
    assert runs == [(1, 1), (2, 2), (2, 2), (2, 2)]
    assert len(set(replies)) == 1


def prompt_tokens(running: Running, *sizes: tuple[int, int]) -> int:
    """The tokens of a prompt with images of these sizes in one message."""
    images = [encode(Image.new("RGB", size, (40 * index, 0, 0))) for index, size in enumerate(sizes)]
    path, body = chat(*map(data_url, images))
    body["messages"][0]["content"].append({"type": "text", "text": "hi"})
    reply = post(running, path, {**body, "max_tokens": 1})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens"])


@row("S0-14", "S0-15")
def test_images_of_one_message_take_what_each_takes_alone(tiny: Running) -> None:
    sizes = ((64, 64), (256, 128), (96, 160), (320, 64))
    text = prompt_tokens(tiny)
    alone = [prompt_tokens(tiny, size) - text for size in sizes]
    assert len(set(alone)) > 2 and min(alone) > 0
    for count in (2, 3, 4):
        assert prompt_tokens(tiny, *sizes[:count]) == text + sum(alone[:count])
    assert prompt_tokens(tiny, sizes[1], sizes[1]) == text + 2 * alone[1]


@row("S0-14")
def test_images_that_do_not_fit_are_a_400_before_any_stream(tiny: Running) -> None:
    size = (576, 576)
    text = prompt_tokens(tiny)
    each = prompt_tokens(tiny, size) - text
    count = (MAX_MODEL_LEN - text) // each + 1
    assert prompt_tokens(tiny, *[size] * (count - 1)) == text + (count - 1) * each, "one fewer fits"
    source = data_url(encode(Image.new("RGB", size)))
    for stream in (False, True):
        path, body = chat(*[source] * count)
        body["messages"][0]["content"].append({"type": "text", "text": "hi"})
        reply = post(tiny, path, {**body, "stream": stream})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert f"{text + count * each} tokens" in error["message"], error


def test_low_detail_is_fewer_tokens(tiny: Running) -> None:
    """Of a picture that is longer than 512 pixels, and few enough for the processor to leave as it is."""
    source = data_url(encode(Image.new("RGB", (2000, 32))))
    tokens = {}
    for detail in ("low", "high", "auto"):
        path, body = chat(source, detail=detail)
        reply = post(tiny, path, {**body, "max_tokens": 1})
        tokens[detail] = reply.json()["usage"]["prompt_tokens"]
    assert tokens["low"] < tokens["high"] == tokens["auto"]


def test_an_image_that_is_refused_is_named_by_its_place(tiny: Running) -> None:
    good, narrow = (data_url(encode(Image.new("RGB", size))) for size in ((64, 64), (2000, 4)))
    path, body = chat(good, good, narrow)
    answer = post(tiny, path, {"messages": [{"role": "system", "content": "Look."}, *body["messages"]]})
    place = "messages[1].content[2].image_url"
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("invalid_image", place)
    message = answer.json()["error"]["message"]
    assert message.startswith(f"Image 3 of this request (`{place}`, data:image/png;base64,…)") and "2000 × 4" in message


def test_the_python_api_shows_images_too(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    (tmp_path / "a.png").write_bytes(file := encode(draw_shape("green", "square", 112)))
    media = MediaConfig(media_root=str(tmp_path))
    with LLM(str(checkpoint("vision:qwen3_vl")), max_model_len=MAX_MODEL_LEN, media=media) as llm:
        asked = [chat(source)[1]["messages"] for source in (f"{tmp_path}/a.png", data_url(file))]
        replies = llm.chat(asked, temperature=0, max_tokens=4)
        with pytest.raises(InvalidImage, match="--media-root"):
            llm.chat(chat("/etc/passwd")[1]["messages"])
    assert replies[0].num_prompt_tokens > 16 and replies[0].text == replies[1].text


def test_a_text_model_refuses_images_before_it_fetches_any(checkpoint: Callable[..., Path], pictures: Host) -> None:
    with engine_served(checkpoint("qwen3"), max_model_len=256, media=MEDIA) as running:
        answer = post(running, *chat(pictures.url("/red.png", HERE)))
    assert answer.status_code == 400 and "takes no images" in answer.json()["error"]["message"]
    assert pictures.requests == []
