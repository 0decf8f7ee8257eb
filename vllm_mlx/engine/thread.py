"""The engine thread: loads, steps, and takes messages between steps. Others only leave messages."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from ..core.errors import EngineDead
from ..core.sequence import Sequence
from .assembly import EngineFacts
from .engine import Deliver, Engine

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Add:
    seqs: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class _Abort:
    seq_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Keep:
    seq: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Wake:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(frozen=True, slots=True)
class _Inspect:
    """A question answered on the engine thread, between steps."""

    ask: Callable[[Engine], object]
    answer: "Future[object]"


_Message = _Add | _Abort | _Keep | _Wake | _Stop | _Inspect


class EngineThread:
    """`deliver` and `died` are called on the engine thread."""

    def __init__(self, load: Callable[[], Engine], deliver: Deliver, died: Callable[[EngineDead], None]):
        self._load = load
        self._deliver = deliver
        self._died = died
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._loaded: Future[EngineFacts] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ended = threading.Event()
        self._end: EngineDead | None = None  # once no message is taken any more
        self.step_started_s: float | None = None  # of the step under way, by the monotonic clock
        self.error: EngineDead | None = None  # the same, if it was not told to stop

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def start(self) -> EngineFacts:
        """Load on the engine thread and wait for it. Raises what loading raised."""
        self._thread.start()
        return self._loaded.result()

    def add(self, seqs: Iterable[Sequence]) -> None:
        self._inbox.put(_Add(tuple(seqs)))

    def abort(self, seq_ids: Iterable[int]) -> None:
        """Takes effect before the next step: within one prefill chunk."""
        self._inbox.put(_Abort(tuple(seq_ids)))

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """What a later turn can use of a sequence: the rest leaves the prefix cache once the sequence has ended."""
        self._inbox.put(_Keep(seq, num_tokens))

    def wake(self) -> None:
        """Images that rows wait for are ready."""
        self._inbox.put(_Wake())

    def inspect(self, ask: Callable[[Engine], T]) -> "Future[T]":
        """Fails with EngineDead once the thread has ended. Who lost interest may cancel the future."""
        answer: Future[T] = Future()
        self._inbox.put(_Inspect(ask, answer))  # type: ignore[arg-type]
        if self._end is not None:
            self._refuse_questions(self._end)
        return answer

    def stop(self, timeout_s: float | None = None) -> None:
        self._inbox.put(_Stop())
        self._ended.wait(timeout_s)

    def _run(self) -> None:
        self._work()
        self._ended.set()
        threading.Event().wait()  # MLX aborts a process that exits soon after a thread that used it: this one stays

    def _work(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(engine.facts)
        try:
            while self._take_messages(engine):
                if engine.has_work:
                    self.step_started_s = time.monotonic()
                    engine.step(self._deliver)
                    self.step_started_s = None
                    if not engine.has_work:
                        engine.rest()
        except BaseException as error:
            logger.exception("The engine thread ended")
            self.error = EngineDead(f"The engine has stopped: {type(error).__name__}: {error}. Restart the server.")
            self._died(self.error)
        self._end = self.error or EngineDead("The engine has been shut down.")
        self._refuse_questions(self._end)

    def _refuse_questions(self, error: EngineDead) -> None:
        """Of messages that nobody takes any more. Whoever puts one after `_end` is set calls this itself."""
        while True:
            try:
                message = self._inbox.get(block=False)
            except Empty:
                return
            if isinstance(message, _Inspect) and message.answer.set_running_or_notify_cancel():
                message.answer.set_exception(error)

    def _take_messages(self, engine: Engine) -> bool:
        """Handle all messages, waiting for one while there is no work. False once told to stop."""
        block = not engine.has_work
        while True:
            try:
                message = self._inbox.get(block=block)
            except Empty:
                return True
            match message:
                case _Add(seqs):
                    for seq in seqs:
                        engine.add(seq)
                case _Abort(seq_ids):
                    for seq_id in seq_ids:
                        engine.abort(seq_id)
                case _Keep(seq, num_tokens):
                    engine.keep(seq, num_tokens)
                case _Wake():
                    engine.wake()
                case _Inspect(ask, answer):
                    _answer(engine, ask, answer)
                case _Stop():
                    return False
            block = False


def _answer(engine: Engine, ask: Callable[[Engine], object], answer: "Future[object]") -> None:
    if not answer.set_running_or_notify_cancel():
        return  # who asked is gone; from here on the future cannot be cancelled
    try:
        answer.set_result(ask(engine))
    except Exception as error:
        answer.set_exception(error)
