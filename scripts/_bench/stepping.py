"""Workload set `step`: the Python of a decode step, part by part, in this process: an engine without a server.

Figures are processor time of the thread, so that neither the device nor another program counts, but for the last one.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
import mlx.core as mx

from tests.support.checkpoints import write_checkpoint
from tests.support.engine_driver import GREEDY, Driver
from vllm_mlx.core.sequence import TokenSampling
from vllm_mlx.runner.sampler import Sampler
from vllm_mlx.server.run import SWITCH_S

from .checkpoint import ARCHITECTURES, SHAPE, speak_in_words
from .client import BenchmarkError
from .figures import BARE, OURS, Figure
from .loops import BareLoop

NUM_LAYERS = 36
NUM_STEPS = 60
_FIRST_STEPS = 10  # steps after all rows decode that are not counted
_EVEN, _UNEVEN = [32], [32, 300, 700, 1500]  # prompt lengths in turn
DRAWN = TokenSampling(temperature=0.6, top_p=0.95, top_k=20, seed=1)
_LOADS = {
    "1 row": (1, _EVEN, GREEDY),
    "8 rows": (8, _EVEN, GREEDY),
    "8 rows of 4 lengths": (8, _UNEVEN, GREEDY),
    "1 row, drawn": (1, _EVEN, DRAWN),
    "8 rows, drawn": (8, _EVEN, DRAWN),
}
MODEL, SAMPLING, SUBMISSION = "the model's graph", "sampling graph", "submission by MLX"
INTERVALS = {OURS: SWITCH_S, "Python's": 0.005}
PARTS = ("schedule", "runner, our part", MODEL, SAMPLING, SUBMISSION, "update", "engine")


def write_deep(folder: Path, architecture: str) -> Path:
    shape = SHAPE if architecture == ARCHITECTURES[0] else {}
    write_checkpoint(folder, architecture, **{**shape, "num_hidden_layers": NUM_LAYERS})
    speak_in_words(folder)
    return folder


class PartClock:
    """Processor time by part. What runs inside another part counts for the inner one alone."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._running: list[str] = []
        self._since = 0.0

    def timed(self, works: Callable[..., Any], part: str) -> Callable[..., Any]:
        def work(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append(part)
            try:
                return works(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()

        return work

    def _switch(self) -> None:
        now = time.thread_time()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


class Steps:
    """Decode steps of one engine, with a clock around each part of them."""

    def __init__(self, path: Path):
        self._driver = Driver(path, prefix_cache=False, max_num_seqs=8)
        self._random_ids = 100

    def profile(self, num_rows: int, lengths: list[int], sampling: TokenSampling) -> dict[str, float]:
        """The median of each part in µs a step."""
        driver = self._driver
        rows = [self._add(lengths[row % len(lengths)], sampling) for row in range(num_rows)]
        while any(driver.seqs[row].num_output_tokens < _FIRST_STEPS for row in rows):
            driver.step()
        steps = []
        with self._clock() as clock:
            step = clock.timed(driver.step, "engine")
            for _ in range(NUM_STEPS):
                clock.seconds = dict.fromkeys(PARTS, 0.0)
                step()
                steps.append(clock.seconds)
        if any(driver.seqs[row].finish_reason for row in rows):
            raise BenchmarkError("A reply ended while its steps were measured.")
        driver.engine.abort(rows)
        driver.run()
        parts = {part: 1e6 * median(step[part] for step in steps) for part in PARTS}
        if missing := [part for part, us in parts.items() if us == 0.0]:
            raise BenchmarkError(f"No step came through: {', '.join(missing)}.")
        return parts

    def beside_rendering(self) -> dict[str, float]:
        """The median of a step of one row in ms, wall time, while another thread renders prompts of 100k tokens.

        The intervals at which threads switch take turns, so that what else runs here slows all of them down.
        """
        driver, before, ended = self._driver, sys.getswitchinterval(), threading.Event()
        row = self._add(_EVEN[0], GREEDY)
        while driver.seqs[row].num_output_tokens < _FIRST_STEPS:
            driver.step()
        rendering = threading.Thread(target=_render_until, args=(ended,))
        rendering.start()
        seconds: dict[str, list[float]] = {name: [] for name in INTERVALS}
        for _ in range(NUM_STEPS):
            for name, switch_s in INTERVALS.items():
                sys.setswitchinterval(switch_s)
                start = time.perf_counter()
                driver.step()
                seconds[name].append(time.perf_counter() - start)
        sys.setswitchinterval(before)
        ended.set()
        rendering.join()
        driver.engine.abort([row])
        driver.run()
        return {name: 1000 * median(values) for name, values in seconds.items()}

    def bare_model(self, num_rows: int) -> float:
        """The median of the same model's graph in a bare loop, in µs."""
        return BareLoop(self._driver.engine.runner._model.module).graph_us([[5] * _EVEN[0]] * num_rows, NUM_STEPS)

    def _add(self, length: int, sampling: TokenSampling) -> int:
        self._random_ids += 1
        prompt = [(self._random_ids * 7 + place) % 500 for place in range(length)]
        return self._driver.add(prompt, 10 * NUM_STEPS, sampling)

    @contextlib.contextmanager
    def _clock(self) -> Iterator[PartClock]:
        clock, engine = PartClock(), self._driver.engine
        seams: list[tuple[Any, str, str]] = [
            (engine.scheduler, "schedule", "schedule"),
            (engine.scheduler, "update", "update"),
            (engine.runner, "decode", "runner, our part"),
            (engine.runner._model, "decode", MODEL),
            (Sampler, "sample", SAMPLING),
            (mx, "async_eval", SUBMISSION),
            (mx, "eval", SUBMISSION),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, part in seams:
                _replace(stack, owner, name, clock.timed(getattr(owner, name), part))
            yield clock


def _render_until(ended: threading.Event) -> None:
    template = jinja2.Template("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}")
    messages = [{"role": "user", "content": "word " * 4} for _ in range(25_000)]
    while not ended.is_set():
        template.render(messages=messages)


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, new: Callable[..., Any]) -> None:
    is_own = name in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, new)
    stack.callback(lambda: setattr(owner, name, old) if is_own else delattr(owner, name))


class _Profiles:
    """Hands out the values of one profile to the figures that each show one of them."""

    def __init__(self) -> None:
        self._left: dict[str, dict[str, float]] = {}

    def measure(self, name: str, profile: Callable[[], dict[str, float]], part: str) -> Callable[[], float]:
        def take() -> float:
            if part not in self._left.get(name, {}):
                self._left[name] = profile()
            return self._left[name].pop(part)

        return take


@contextlib.contextmanager
def prepared(model: Path) -> Iterator[list[Figure]]:
    steps = Steps(model)
    profiles = _Profiles()
    figures = []
    for load, (num_rows, lengths, sampling) in _LOADS.items():
        for part in PARTS if sampling is GREEDY else (SAMPLING,):
            measures = {OURS: profiles.measure(load, partial(steps.profile, num_rows, lengths, sampling), part)}
            if part == MODEL and lengths is _EVEN:
                measures[BARE] = partial(steps.bare_model, num_rows)
            figures.append(Figure(name=f"{load}: {part}", unit="µs/step", measures=measures, aims=()))
    measures = {name: profiles.measure("rendering", steps.beside_rendering, name) for name in INTERVALS}
    yield [*figures, Figure(name="1 row, a thread renders: wall time", unit="ms/step", measures=measures, aims=())]
