"""Video files of strangers: which frames are shown of good ones, and what is said of the others."""

import asyncio
from random import Random

import numpy as np
import pytest

from tests.support.rows import cases
from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.errors import Cancelled, InvalidImage
from vllm_mlx.media.decode import Clip
from vllm_mlx.media.processes import Processes
from vllm_mlx.media.video import FrameSampling, VideoReader
from vllm_mlx.util.tasks import Deadline

from .samples import corners
from .samples import encode as encode_picture
from .video_samples import STEP, encode, sound, turned

GOOD = [encode(), encode("webm", "libvpx-vp9"), encode("gif", "gif", pixels="rgb8"), encode("avi")]
_OPPOSITE = {"top": "bottom", "bottom": "top", "left": "right", "right": "left"}
LIMITS = {"max_image_pixels": 1 << 20, "max_video_pixels": 1 << 20}


def decode(data: bytes, fps: float | None = None, **limits: float) -> Clip:
    """Open and decode it, each in a process."""

    async def read() -> Clip:
        reader = VideoReader(Processes(), FrameSampling(), MediaConfig(**LIMITS | limits))
        file = await reader.open(data, fps, Deadline(60, ""), "")
        clip = await reader.decode(file, Deadline(60, ""), "")
        assert clip.num_pixels == file.num_pixels
        return clip

    return asyncio.run(read())


def shown(clip: Clip) -> list[float]:
    """The frames' numbers, by their brightness."""
    return [float(value) for value in clip.pixels[:, 20, 20, 0] / STEP]


@pytest.mark.parametrize(
    ("container", "codec", "pixels"),
    [
        ("mp4", "libx264", "yuv420p"),
        ("webm", "libvpx-vp9", "yuv420p"),
        ("gif", "gif", "rgb8"),
        pytest.param("mov", "mjpeg", "yuvj420p", marks=pytest.mark.full),
        pytest.param("matroska", "mpeg4", "yuv420p", marks=pytest.mark.full),
        pytest.param("avi", "mpeg4", "yuv420p", marks=pytest.mark.full),
    ],
)
def test_two_frames_of_a_second_are_shown_from_the_first_to_the_last(container: str, codec: str, pixels: str) -> None:
    clip = decode(encode(container, codec, pixels=pixels))
    assert clip.pixels.shape == (4, 48, 64, 3)
    assert shown(clip) == pytest.approx([0, 6, 13, 19], abs=1.1)
    assert clip.times == pytest.approx((0, 0.6, 1.3, 1.9))
    assert clip.fps == pytest.approx(2)


def test_a_rate_that_is_asked_for_is_kept_to() -> None:
    assert shown(decode(encode(), fps=5)) == pytest.approx([0, 2, 4, 6, 8, 11, 13, 15, 17, 19], abs=0.5)
    assert len(FrameSampling().choose(20, 2.0, 1000)) == 20
    assert len(FrameSampling().choose(20, 2.0, 0.1)) == FrameSampling().min_frames
    assert decode(encode(num_frames=1)).times == (0.0,)


def test_a_long_one_is_shown_in_as_many_frames_as_the_model_takes() -> None:
    assert FrameSampling(max_frames=6).choose(1000, 500.0, None) == [0, 200, 400, 599, 799, 999]


def test_frames_are_scaled_down_to_their_pixels_together() -> None:
    clip = decode(encode(size=(640, 480)), max_video_pixels=40_000)
    assert 38_000 < clip.num_pixels <= 40_000
    assert clip.width / clip.height == pytest.approx(4 / 3, rel=0.02)
    assert shown(clip) == pytest.approx([0, 6, 13, 19], abs=1)


SIDES = {"top": np.s_[2, 20], "right": np.s_[20, -3], "bottom": np.s_[-3, 20], "left": np.s_[20, 2]}
MATRICES = {"top": (1, 0, 0, 1), "right": (0, 1, -1, 0), "bottom": (-1, 0, 0, -1), "left": (0, -1, 1, 0)}


@pytest.mark.parametrize("white", cases(SIDES, ["right", "bottom"]))
def test_it_is_shown_as_the_camera_was_held(white: str) -> None:
    frame = decode(turned(encode(num_frames=2, white_rows=24), *MATRICES[white])).pixels[0, ..., 0]
    assert frame.shape == ((48, 64) if white in ("top", "bottom") else (64, 48))
    assert frame[SIDES[white]] > 200 and frame[SIDES[_OPPOSITE[white]]] < 50


@pytest.mark.parametrize("seed", cases(range(60), range(2)))
def test_a_damaged_file_is_shown_or_refused(seed: int) -> None:
    random = Random(seed)
    data = bytearray(random.choice(GOOD))
    for _ in range(random.choice((1, 3, 20))):
        data[random.randrange(len(data))] = random.randrange(256)
    try:
        clip = decode(bytes(data[: random.choice((len(data), random.randrange(20, len(data))))]))
    except InvalidImage as error:
        assert error.message
    else:
        assert 1 <= len(clip) <= FrameSampling().max_frames


def test_a_file_is_always_decoded_to_the_same_frames() -> None:
    data = encode()
    first, again = decode(data), decode(data)
    assert np.array_equal(first.pixels, again.pixels) and (first.times, first.fps) == (again.times, again.fps)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not a video that this server reads"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "not a video that this server reads"),
        (b"<html>", "markup"),
        (encode_picture(corners()), "image. Send it as one"),
        (encode()[:300], "broken"),
        (encode("mov", "mjpeg", pixels="yuvj420p").replace(b"jpeg", b"xxxx"), "encoded as nothing known"),
        (b"\x1a\x45\xdf\xa3" + b"\0" * 2000, "broken"),
        (b"\0\0\0\x18ftypisom" + b"\xff" * 2000, "broken"),
        (sound(), "no frames in it"),
        (encode("matroska", "ffv1"), "encoded as ffv1"),
        (encode("matroska", "mpeg4")[:60], "broken|no pictures"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",  # some containers hold random numbers
)
def test_what_is_no_video_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidImage, match=words):
        decode(data)


def test_what_is_beyond_a_limit_is_refused() -> None:
    with pytest.raises(InvalidImage, match="640 × 480 pixels"):
        decode(encode(size=(640, 480)), max_image_pixels=100_000)
    with pytest.raises(InvalidImage, match="--max-decode-s"):
        decode(encode(), max_decode_s=1e-9)


def test_neither_frames_are_counted_nor_decoded_for_a_client_that_has_left() -> None:
    async def leave() -> None:
        reader, deadline = VideoReader(Processes(), FrameSampling(), MediaConfig(**LIMITS)), Deadline(60, "")
        file = await reader.open(encode(), None, deadline, "")
        deadline.cancel()
        with pytest.raises(Cancelled):
            await reader.decode(file, deadline, "")
        with pytest.raises(Cancelled):
            await reader.open(encode(), None, deadline, "")

    asyncio.run(leave())
