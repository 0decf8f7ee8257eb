"""A video that comes as its frames: what is in memory at once, and when decoding ends."""

import numpy as np
import pytest
from PIL import Image

from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.errors import Cancelled, InvalidImage
from vllm_mlx.media.decode import ImageFile
from vllm_mlx.media.video import FrameFiles
from vllm_mlx.util.tasks import Deadline

from .samples import encode, live_blocks

CONFIG = MediaConfig()


def frame(number: int, size: tuple[int, int] = (60, 40), **options: object) -> ImageFile:
    return ImageFile(encode(Image.new("RGB", size, (number, 0, 0)), **options), max_pixels=10**6)


def frames(number: int, **limits: float) -> FrameFiles:
    files = [frame(index) for index in range(number)]
    return FrameFiles(files, 2.0, MediaConfig(**limits))


class Clock:
    """A clock that stands still. It is read at each check of a deadline: between any two frames."""

    def __init__(self) -> None:
        self.live_blocks: list[int] = []

    def __call__(self) -> float:
        self.live_blocks.append(live_blocks())
        return 0.0


def test_frames_are_shown_in_order_and_scaled_down_together() -> None:
    clip = frames(5, max_video_pixels=5 * 600).decode(Deadline(60, ""))
    assert clip.pixels.shape == (5, 20, 30, 3)
    assert clip.pixels[:, 3, 3, 0].tolist() == [0, 1, 2, 3, 4]
    assert clip.times == (0, 0.5, 1, 1.5, 2) and clip.fps == 2


def test_a_decoded_frame_is_let_go_before_the_next_is_decoded() -> None:
    video, clock = frames(8), Clock()
    before = live_blocks()
    video.decode(Deadline(60, "", clock=clock))
    assert clock.live_blocks == [before] * 9  # once when the deadline was made


def test_all_shown_frames_and_one_whole_frame_count_as_in_memory() -> None:
    assert frames(8, max_video_pixels=8 * 600).num_pixels == 8 * 600 + 60 * 40


def test_decoding_ends_at_its_limit() -> None:
    with pytest.raises(InvalidImage, match="--max-decode-s"):
        frames(2, max_decode_s=1e-9).decode(Deadline(60, ""))


def test_decoding_ends_between_frames_when_the_client_has_left() -> None:
    num_checks = 0

    def clock() -> float:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 4:
            deadline.cancel()
        return 0.0

    deadline = Deadline(60, "", clock=clock)
    with pytest.raises(Cancelled):
        frames(100).decode(deadline)
    assert num_checks == 4, "no frame was decoded after the third"


def test_frames_whose_headers_differ_in_size_are_refused_before_any_is_decoded() -> None:
    with pytest.raises(InvalidImage, match="not all of one size"):
        FrameFiles([frame(0), frame(1, (60, 41))], 2.0, CONFIG)


def test_a_frame_that_was_turned_on_its_side_is_of_another_size() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, upright = frame(1, (40, 60), exif=exif), frame(0)
    clip = FrameFiles([upright, turned], 2.0, CONFIG).decode(Deadline(60, ""))
    assert np.array_equal(clip.pixels.shape, (2, 40, 60, 3))
    with pytest.raises(InvalidImage, match="not all of one size"):
        sideways = frame(1, exif=exif)
        FrameFiles([upright, sideways], 2.0, CONFIG).decode(Deadline(60, ""))
