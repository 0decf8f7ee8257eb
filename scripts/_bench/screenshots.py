"""Part of workload set `vision`: a conversation of screenshots, counted by an engine in the benchmark's own process."""

import asyncio
import contextlib
import platform
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.messages import ImagePart, Message, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.loading import start_engine

from .figures import OURS, Aim, Figure

NUM_PICTURES = 40
SIZE = (1920, 1080)
_SHARE = 5.0  # % of the first turn's processor time that preparing the next one may take


class Screenshots:
    """Prepares a prompt and runs no model: what is measured is what pictures cost before the tower sees them."""

    def __init__(self, engine: EngineClient, runner: asyncio.Runner, draw: Callable[[], str]):
        """`draw`: a new picture, as a data URL."""
        self._engine = engine
        self._runner = runner
        self._draw = draw
        self._first_s = self._second_s = 0.0

    def play(self) -> float:
        """Returns seconds of processor time of the first turn."""
        shown = tuple(ImagePart(self._draw()) for _ in range(NUM_PICTURES))
        asked = Message("user", (*shown, TextPart("What changed?")))
        said, more = Message("assistant", (TextPart("Nothing."),)), Message("user", (TextPart("Sure?"),))
        self._first_s = self._count_s(asked)
        self._second_s = self._count_s(asked, said, more)
        return self._first_s

    def percent(self) -> float:
        """The second turn, of the first."""
        return 100 * self._second_s / self._first_s

    def peak_mb(self) -> float:
        """Of this process so far: model, pictures as they were sent, and all that is kept of them."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1e6 if platform.system() == "Darwin" else 1e6 / 1024)

    def _count_s(self, *messages: Message) -> float:
        request = Request(request_id="screenshots", messages=messages)
        started_s = time.process_time()
        self._runner.run(self._engine.count_tokens(request))
        return time.process_time() - started_s


@contextlib.contextmanager
def prepared(model: Path, draw: Callable[[], str]) -> Iterator[list[Figure]]:
    with asyncio.Runner() as runner:
        engine = start_engine(EngineConfig(model=str(model)))
        try:
            yield figures(Screenshots(engine, runner, draw))
        finally:
            runner.run(engine.shutdown(0))


def figures(screenshots: Screenshots) -> list[Figure]:
    """In this order: the first one plays, the next ones read."""
    name = f"{NUM_PICTURES} screenshots prepared"
    share = (Aim(bound=_SHARE, at_least=False),)
    return [
        Figure(name=f"{name}, CPU", unit="s", measures={OURS: screenshots.play}, aims=()),
        Figure(name=f"{name}, next turn, of first", unit="%", measures={OURS: screenshots.percent}, aims=share),
        Figure(name=f"{name}, process, peak", unit="MB", measures={OURS: screenshots.peak_mb}, aims=()),
    ]
