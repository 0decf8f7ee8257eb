"""Containers that claim to be huge, and frames of odd shapes: the process that reads them stays within its limit."""

import io
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction

import av
import pytest
from PIL import Image

from vllm_mlx.core.errors import InvalidImage
from vllm_mlx.media import worker
from vllm_mlx.media.video import container
from vllm_mlx.media.worker import END, FRAME, REFUSED, STAMPS, TOO_LARGE, VideoTask
from vllm_mlx.util.tasks import python_process

from .hostile_videos import HOSTILE
from .samples import encode as encode_image
from .test_video import decode
from .video_samples import encode

QUICK = {"stsz", "trun many", "mkv cues"}
LIMIT_MB = 256
OVERSHOOT_MB = 96  # between two looks of the watch, on a busy machine
# Starts the process from one that is small: a process inherits the peak of the one that starts it.
MEASURE = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, used = os.wait4(pid, 0)
sys.stderr.write(f"{os.waitstatus_to_exitcode(status)} {used.ru_maxrss >> (20 if sys.platform == 'darwin' else 10)}")
"""


def read(data: bytes) -> tuple[int, int, list[tuple[bytes, bytes]]]:
    """The exit status of the process that opens a video, its peak in megabytes, and what it sent."""
    command, environment = python_process(worker.__name__)
    task = VideoTask(container=container(data), max_frame_pixels=50_000_000, max_s=20, max_memory_bytes=LIMIT_MB << 20)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command, task.argument],
        input=data,
        env=environment,
        capture_output=True,
        check=True,
    )
    status, peak_mb = map(int, done.stderr.split())
    return status, peak_mb, list(sent(done.stdout))


def sent(output: bytes) -> Iterator[tuple[bytes, bytes]]:
    while output:
        kind, length = FRAME.unpack_from(output)
        yield kind, output[FRAME.size : FRAME.size + length]
        output = output[FRAME.size + length :]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in HOSTILE]
)
def test_a_table_that_claims_to_be_huge_costs_no_more_than_the_limit(name: str) -> None:
    status, peak_mb, frames = read(HOSTILE[name])
    assert peak_mb < LIMIT_MB + OVERSHOOT_MB
    kinds = [kind for kind, _ in frames]
    assert (status, kinds) in ((TOO_LARGE, []), (0, [REFUSED]), (0, [STAMPS, END]))
    if name in ("stsz", "trun many"):
        assert status == TOO_LARGE, "the limit was met"


def test_a_file_that_opens_in_spite_of_its_tables_is_refused_when_it_is_decoded() -> None:
    for name in ("webm size", "mkv cues"):
        with pytest.raises(InvalidImage, match="broken"):
            decode(HOSTILE[name])


@pytest.mark.parametrize(("format", "size"), [("mp4", (3216, 16)), ("gif", (16, 3216))])
def test_frames_of_an_odd_shape_are_refused_before_they_are_decoded(format: str, size: tuple[int, int]) -> None:
    options = {"codec": "gif", "pixels": "rgb8"} if format == "gif" else {}
    with pytest.raises(InvalidImage, match=f"its frames have {size[0]} × {size[1]} pixels; a side may have at most"):
        decode(encode(format, size=size, num_frames=2, **options))


def test_a_video_whose_later_frames_are_of_an_odd_shape_is_refused() -> None:
    """JPEGs, which state their own sizes: a thread of pixels among them."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as output:
        stream = output.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for index, size in enumerate([(64, 48), (60_000, 16), (16, 60_000), (64, 48)]):
            packet = av.Packet(encode_image(Image.new("RGB", size), "JPEG"))
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, index, index, Fraction(1, 10)
            output.mux(packet)
    with pytest.raises(InvalidImage, match="broken"):
        decode(file.getvalue())
