"""MLX as Metal makes it when a command buffer fails, simulated on the CPU.

What the command buffer was to write is garbage, no read of it raises, and the next call that submits work or waits
gets one RuntimeError (mlx/backend/metal/device.cpp, `CommandEncoder::get_command_encoder` and `synchronize`).

The error is known at once, or late: when the work of the submission ends, which the first wait for that work or for
later work makes sure of. Work that was submitted before is submitted without an error.
"""

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from vllm_mlx.cache.layers import arrays, leaves
from vllm_mlx.runner.runner import Runner

INTERACTIVITY = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)."
)
OUT_OF_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)."
)
NO_BUFFER = "[malloc] Unable to allocate 3221225472 bytes."
SEAMS = {
    "draw": "launch", "start": "launch", "verify": "verify", "capture": "capture", "restore": "restore",
    "_prefill_chunk": "chunk", "split": "split", "encode": "encode", "merge": "join", "keep": "leave",
    "extract": "leave", "_check_device": "probe",
}  # fmt: skip


class FailingDevice:
    """Counts submissions, and lets chosen ones fail."""

    def __init__(self, runner: Runner):
        self.submissions: list[str] = []  # the seam at which each was made
        self.num_failed = 0
        self._runner = runner
        self._fails: Callable[[int, str], bool] = lambda number, seam: False
        self._text = INTERACTIVITY
        self._token = 7
        self._untold: str | None = None  # the error of a failed command buffer that no call has got yet
        self._is_late, self._has_probe = False, True
        self._running: dict[int, str] = {}  # errors that are not known yet, by the number of the submission
        self._submitted: list[tuple[int, mx.array]] = []  # what submissions write, from the oldest of these on
        self.fresh: list[Any] = []  # the caches made last, which the runner may not hold yet

    def fail(
        self,
        numbers: Iterable[int],
        text: str = INTERACTIVITY,
        *,
        token: int = 7,
        is_late: bool = False,
        has_probe: bool = True,
    ) -> None:
        """Let the submissions of these numbers fail, counted from now. `token` is what a failed step samples.

        `is_late`: the errors are known when the work ends. `has_probe`: the runner's own check of the device hears of
        errors.
        """
        failing = frozenset(numbers)
        self.wait()
        self.submissions.clear()
        self._is_late, self._has_probe = is_late, has_probe
        self._fails, self._text, self._token = (lambda number, seam: number in failing), text, token

    def fail_next(self, seam: str, times: int, text: str) -> None:
        """Let the next submissions at a seam fail."""
        self._fails, self._text = (lambda _, found: found == seam and self.num_failed < times), text
        self.num_failed = 0

    def tell(self, seam: str) -> None:
        if seam == "probe" and not self._has_probe:
            return
        text, self._untold = self._untold, None
        if text is not None:
            raise RuntimeError(text)

    def wait(self) -> None:
        """All that was submitted has ended."""
        self._end(len(self.submissions))

    def read(self, works: Callable[..., Any], array: mx.array) -> Any:
        """Carry out a call that waits for the submission which writes an array."""
        number = next((number for number, written in self._submitted if written is array), None)
        if number is None:
            number = len(self.submissions) if num_pending([array]) else -1
        value = works(array)
        self._end(number)
        return value

    def _end(self, last: int) -> None:
        """The errors of submissions up to `last` are known."""
        for number in [number for number in self._running if number <= last]:
            self._untold = self._running.pop(number)
        if not self._running:
            self._submitted.clear()

    def submit(self, works: Callable[..., Any], *args: Any, waits: bool = False) -> None:
        seam, chunk = _seam()
        self.tell(seam)
        number = len(self.submissions)
        self.submissions.append(seam)
        if not self._fails(number, seam):
            works(*args)
            self._note(number, args, waits=waits)
            return
        self.num_failed += 1
        if self._text == NO_BUFFER:
            raise RuntimeError(NO_BUFFER)  # an allocation fails before the work begins
        written = [array for array in arrays(list(args)) if num_pending([array])]
        works(*args)
        self._running[number] = self._text
        self._note(number, args, waits=waits or not self._is_late)
        batches = [batch.leaves for batch in self._runner.batches]
        self._garble(written, [chunk] if chunk else [*self._runner._prefilled.values(), *batches, self.fresh])

    def _note(self, number: int, args: Iterable[Any], *, waits: bool) -> None:
        if self._running:
            self._submitted += [(number, array) for array in arrays(list(args))]
        if waits:
            self._end(number)

    def _garble(self, written: Iterable[mx.array], rows: Iterable[Any]) -> None:
        for array in written:
            array[...] = self._garbage(array)
        for caches in rows:
            for leaf in leaves(caches):  # a failed kernel leaves its inputs alone, so that nothing is changed in place
                for name in ("keys", "values"):
                    if isinstance(getattr(leaf, name, None), mx.array):
                        setattr(leaf, name, self._garbage(getattr(leaf, name)))
                if hasattr(leaf, "cache"):
                    leaf.cache = [None if array is None else self._garbage(array) for array in leaf.cache]

    def _garbage(self, array: mx.array) -> mx.array:
        value = 0.5 if mx.issubdtype(array.dtype, mx.floating) else self._token
        return mx.full(array.shape, value).astype(array.dtype)


def _seam() -> tuple[str, Any]:
    """The innermost seam that runs now, and the caches of its row if that is a prefill chunk."""
    frame = sys._getframe(1)
    while frame is not None:
        seam = SEAMS.get(frame.f_code.co_name)
        if seam is not None:
            return seam, frame.f_locals.get("caches") if seam == "chunk" else None
        frame = frame.f_back
    return "other", None


@contextmanager
def failing_device(runner: Runner) -> Iterator[FailingDevice]:
    """No submission fails before `fail` names it."""
    device = FailingDevice(runner)
    model = type(runner.model)
    makes, evaluates, launches, waits, reads = (
        model.new_caches, mx.eval, mx.async_eval, mx.synchronize, mx.array.tolist
    )  # fmt: skip

    def new_caches(self: Any) -> Any:
        device.fresh = makes(self)
        return device.fresh

    def synchronize(*args: Any) -> None:
        waits(*args)
        device.wait()
        device.tell(_seam()[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "new_caches", new_caches)
        patch.setattr(mx, "eval", lambda *args: device.submit(evaluates, *args, waits=True))
        patch.setattr(mx.array, "tolist", lambda array: device.read(reads, array))
        patch.setattr(mx, "async_eval", lambda *args: device.submit(launches, *args))
        patch.setattr(mx, "synchronize", synchronize)
        yield device


def num_pending(found: Iterable[mx.array]) -> int:
    """Number of operations behind the arrays that are not evaluated yet."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *found)
    return graph.getvalue().count("shape=rectangle")
