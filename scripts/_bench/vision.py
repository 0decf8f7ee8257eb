"""Workload set `vision`: the cost of images, new, known and beside running replies, and of 40 screenshots in a chat."""

import asyncio
import base64
import contextlib
import io
import platform
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.utils import load
from PIL import Image

from scripts.served import BenchmarkError, Messages, ask, serving, worst_gap_s
from tests.support.vision_checkpoints import write_vision_checkpoint
from tests.support.vision_families import FAMILIES
from vllm_mlx.cli.remote import Remote
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.messages import ImagePart, Message, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.loading import start_engine

from .checkpoint import Prompts, speak_in_words
from .figures import OURS, Figure, Played, at_most, read_off
from .serving import NUM_DECODERS

FAMILY = "qwen3_5"  # a hybrid
SIDE = 2048  # pixels
TILES = 32  # a side: random colours, so that no two pictures are alike and files are small
QUESTION = 24  # tokens
REPLY = 8
NEW_QUESTION, ANOTHER_CHAT = (f"same image, {what}, of cold" for what in ("new question", "another chat"))
_PATCH = 32  # pixels: large, since the CPU's attention holds the scores of all pairs of patches
_SHARE = 10.0  # % of the cold time that a new question about a known picture may take
NUM_SCREENSHOTS, SCREENSHOT = 40, (1920, 1080)
SHOTS = f"{NUM_SCREENSHOTS} screenshots prepared"
NEXT_TURN, PEAK = f"{SHOTS}, next turn, of first", f"{SHOTS}, process, peak"
_SECOND_SHARE = 5.0  # % of the first turn's processor time that preparing the next one may take
_STALL_S = EngineConfig(model="").stall_ms / 1000


@dataclass(slots=True)
class VisionLoad(Played):
    port: int
    prompts: Prompts

    def play(self) -> float:
        """Return the cold time to the first token, in milliseconds."""
        picture = new_picture()
        cold = self._ttft_ms(self._about(picture))
        encoded = self._images()["encoded"]
        self.values[NEW_QUESTION] = 100 * self._ttft_ms(self._about(picture)) / cold
        system = {"role": "system", "content": self.prompts.text(QUESTION)}
        self.values[ANOTHER_CHAT] = 100 * self._ttft_ms([system, *self._about(picture)]) / cold
        if self._images()["encoded"] != encoded:
            raise BenchmarkError("The vision encoder ran again for an image that it had seen.")
        return cold

    def worst_gap(self) -> float:
        """Return the longest pause of any of four decoding streams while a new image is answered, in bounds.

        A bound is one encoding, the longest so far, and the stall budget.
        """
        texts = [self.prompts.text(QUESTION) for _ in range(NUM_DECODERS)]
        gap_s = worst_gap_s(self.port, texts, self._about(new_picture()), REPLY)
        return gap_s / (float(self._images()["longest_encode_s"]) + _STALL_S)

    def _about(self, picture: str) -> Messages:
        """Return a message of the image and a new question."""
        image = {"type": "image_url", "image_url": {"url": picture}}
        return [{"role": "user", "content": [image, {"type": "text", "text": self.prompts.text(QUESTION)}]}]

    def _ttft_ms(self, conversation: Messages) -> float:
        [reply] = ask(self.port, [conversation], REPLY)
        return 1000 * reply.ttft_s

    def _images(self) -> dict[str, Any]:
        return dict(Remote(f"http://127.0.0.1:{self.port}").status()["images"])


@dataclass(slots=True)
class Screenshots(Played):
    """Prepares prompts without running the model: the cost of images before the encoder sees them."""

    engine: EngineClient
    runner: asyncio.Runner

    def play(self) -> float:
        """Return seconds of processor time of the first turn."""
        shown = tuple(ImagePart(new_picture(SCREENSHOT)) for _ in range(NUM_SCREENSHOTS))
        asked = Message("user", (*shown, TextPart("What changed?")))
        said, more = Message("assistant", (TextPart("Nothing."),)), Message("user", (TextPart("Sure?"),))
        first_s = self._count_s(asked)
        self.values[NEXT_TURN] = 100 * self._count_s(asked, said, more) / first_s
        peak = resource.getrusage(
            resource.RUSAGE_SELF
        ).ru_maxrss  # with the model, the images, and what is kept of them
        self.values[PEAK] = peak / (1e6 if platform.system() == "Darwin" else 1e6 / 1024)
        return first_s

    def _count_s(self, *messages: Message) -> float:
        request = Request(request_id="screenshots", messages=messages)
        started_s = time.process_time()
        self.runner.run(self.engine.count_tokens(request))
        return time.process_time() - started_s


def new_picture(size: tuple[int, int] = (SIDE, SIDE)) -> str:
    tiles = Image.frombytes("RGB", (TILES, TILES), random.randbytes(3 * TILES * TILES))
    file = io.BytesIO()
    tiles.resize(size, Image.Resampling.NEAREST).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def write_tiny(folder: Path) -> Path:
    """Write a tiny checkpoint whose processor takes four megapixels unscaled."""
    _, images = FAMILIES[FAMILY]
    images = {
        **images,
        "patch_size": _PATCH,
        "max_pixels": SIDE**2,
        "size": {**images["size"], "longest_edge": SIDE**2},
    }
    write_vision_checkpoint(folder, FAMILY, images=images, tower={"patch_size": _PATCH})
    speak_in_words(folder)
    return folder


@contextlib.contextmanager
def prepared(model: Path) -> Iterator[list[Figure]]:
    """Yield the figures of this set, measurable while the block runs."""
    prompts = Prompts(load(str(model))[1])
    with serving(None, str(model)) as server, _screenshots(model) as of_screenshots:
        yield [*figures(VisionLoad(server.port, prompts)), *of_screenshots]


@contextlib.contextmanager
def _screenshots(model: Path) -> Iterator[list[Figure]]:
    with asyncio.Runner() as runner:
        engine = start_engine(EngineConfig(model=str(model)))
        try:
            yield _screenshot_figures(Screenshots(engine, runner))
        finally:
            runner.run(engine.shutdown(0))


def _screenshot_figures(shots: Screenshots) -> list[Figure]:
    """Return the figures in their order: the first one plays, the next ones read."""
    loads = {OURS: shots}
    return [
        Figure(f"{SHOTS}, CPU", "s", {OURS: shots.play}),
        read_off(NEXT_TURN, "%", loads, at_most(_SECOND_SHARE)),
        read_off(PEAK, "MB", loads),
    ]


def figures(vision: VisionLoad) -> list[Figure]:
    """Return the figures in their order: the first one plays, the next ones read."""
    loads = {OURS: vision}
    return [
        Figure("cold TTFT, 4 megapixels", "ms", {OURS: vision.play}),
        read_off(NEW_QUESTION, "%", loads, at_most(_SHARE)),
        read_off(ANOTHER_CHAT, "%", loads),
        Figure(f"worst gap of {NUM_DECODERS}, an image encoded", "× bound", {OURS: vision.worst_gap}, (at_most(1.0),)),
    ]
