"""Videos from the socket to a checkpoint that knows nothing. What is wrong with one is a 400."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.running import Running
from tests.support.shapes import draw_shape
from vllm_mlx.core.config import MediaConfig

from ..media.hostile_videos import HOSTILE
from ..media.hosts import HERE, Host, host, reply
from ..media.samples import encode as encode_picture
from ..media.video_samples import encode, sound
from .watched import engine_served

VIDEO = encode(num_frames=20, size=(96, 64))
FRAMES = [draw_shape(color, "circle", 64) for color in ("red", "green", "blue")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "clip.mp4").write_bytes(VIDEO)
    return folder


@pytest.fixture(scope="module")
def server(root: Path, checkpoint: Callable[..., Path]) -> Iterator[Running]:
    media = MediaConfig(max_video_bytes=100_000, max_videos=2, allow_private_media=True, media_root=str(root))
    with engine_served(checkpoint("vision:qwen3_vl"), media=media) as running:
        yield running


@pytest.fixture
def videos() -> Iterator[Host]:
    with host() as running:
        running.routes["/clip"] = reply(VIDEO, "Content-Type: video/mp4")
        yield running


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{encoded(data)}"


def video(source: str, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": source}, **fields}


def frames(*files: bytes) -> dict[str, Any]:
    return {"type": "video", "video": [url(file, "image/jpeg") for file in files]}


def post(http: httpx.Client, *parts: Any, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    content = [*parts, {"type": "text", "text": "What is in this image?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, **fields}
    return http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


def usage(answer: httpx.Response) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were not computed."""
    assert answer.status_code == 200, answer.text
    told = answer.json()["usage"]
    return told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"]


def test_a_video_is_one_whichever_way_it_comes_and_its_frames_are_prompt_tokens(
    http: httpx.Client, videos: Host, root: Path
) -> None:
    num_tokens, num_cached = usage(post(http, video(url(VIDEO))))
    assert num_cached < num_tokens // 2
    for source in (*[videos.url("/clip", HERE)] * 2, str(root / "clip.mp4")):
        assert usage(post(http, video(source))) == (num_tokens, num_tokens - 1)
    assert videos.paths() == ["/clip"]
    more, _ = usage(post(http, video(url(VIDEO), fps=5)))
    assert more > num_tokens
    assert usage(post(http, video(url(VIDEO)), mm_processor_kwargs={"fps": 5})) == (more, more - 1)
    two, _ = usage(post(http, video(url(VIDEO)), video(url(encode(num_frames=8, size=(96, 64))))))
    assert two > num_tokens + 30


def test_a_video_may_come_as_its_frames(http: httpx.Client) -> None:
    given = [encode_picture(frame, "JPEG") for frame in FRAMES]
    listed = frames(*given)
    joined = video("data:video/jpeg;base64," + ",".join(map(encoded, given)))
    num_tokens, _ = usage(post(http, listed))
    assert usage(post(http, joined)) == (num_tokens, num_tokens - 1)
    _, num_cached = usage(post(http, {**listed, "fps": 0.5}))
    assert num_cached < num_tokens // 2, "other times are another video"


def test_an_animation_is_a_video_where_it_is_sent_as_one(http: httpx.Client) -> None:
    data = encode("gif", "gif", pixels="rgb8", num_frames=6)
    as_video, _ = usage(post(http, video(url(data, "image/gif"))))
    as_image, _ = usage(post(http, {"type": "image_url", "image_url": {"url": url(data, "image/gif")}}))
    assert as_video > as_image


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (video(url(b"text")), "Video 1 of this request"),
        (video(url(sound())), "no frames in it"),
        pytest.param(video(url(HOSTILE["trun many"])), "it takes too much memory to decode", marks=pytest.mark.full),
        (video(url(encode(size=(3216, 16), num_frames=2))), "its frames have 3216 × 16 pixels; a side may have"),
        (frames(encode_picture(Image.new("RGB", (201, 1)), "JPEG")), "its frame 1: it has 201 × 1 pixels"),
        (video(url(encode_picture(FRAMES[0]))), "it is an image. Send it as one"),
        (video(url(VIDEO + bytes(100_000))), "--max-video-bytes"),
        (video("file:///etc/passwd"), "no such file"),
        (video("http://127.0.0.1:9/x"), "no connection"),
        (video("ftp://x/y"), "neither a data URL"),
        (video(f"data:video/jpeg;base64,{encoded(encode_picture(FRAMES[0]))},%%%"), "its frame 2: "),
        (
            {"type": "video", "video": [url(encode_picture(draw_shape("red", "star", side))) for side in (64, 96)]},
            "one size",
        ),
    ],
)
def test_what_is_wrong_with_a_video_is_said(http: httpx.Client, part: dict[str, Any], words: str) -> None:
    answer = post(http, part)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"] and error["code"] == "invalid_video"


def test_too_many_and_unknown_options_are_refused(http: httpx.Client) -> None:
    assert "--limit-mm-per-prompt video=3" in post(http, *[video(url(VIDEO))] * 3).text
    for fields in ({"mm_processor_kwargs": {"fps": 0}}, {"mm_processor_kwargs": {"num_frames": 3}}):
        answer = post(http, video(url(VIDEO)), **fields)
        assert answer.status_code == 400 and "mm_processor_kwargs" in answer.text


def test_other_protocols_take_none(http: httpx.Client) -> None:
    assert post(http, video(url(VIDEO)), path="/v1/messages").status_code == 400
