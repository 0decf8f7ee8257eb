"""The engine thread: it loads, steps, and handles messages between steps. Other threads only send messages."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from ..core.errors import EngineDead
from ..core.fence import Fence
from ..core.sequence import Sequence
from .engine import Deliver, Engine
from .monitoring.facts import EngineFacts

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
    """Runs one engine on a thread of its own. `facts` are known after `start`."""

    facts: EngineFacts

    def __init__(self, load: Callable[[], Engine]):
        self._load = load
        self._deliver: Deliver = _nobody_listens
        self._died: Callable[[EngineDead], None] = _nobody_listens
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._loaded: Future[EngineFacts] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ended = threading.Event()
        self._end: EngineDead | None = None  # set once no message is handled any more
        self.step_started_s: float | None = None  # start of the running step, by the monotonic clock
        self.error: EngineDead | None = None  # why the thread ended, unless `stop` ended it

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def start(self) -> None:
        """Load on the engine thread and wait for it. Raises the error of loading."""
        self._thread.start()
        self.facts = self._loaded.result()

    def listen(self, deliver: Deliver, died: Callable[[EngineDead], None]) -> None:
        """Set the callbacks for updates and for the thread's death, before any sequence is added.

        They are called on the engine thread.
        """
        self._deliver, self._died = deliver, died

    def check_alive(self) -> None:
        """Raises EngineDead if the thread has ended by an error."""
        if self.error is not None:
            raise self.error

    def add(self, seqs: Iterable[Sequence]) -> None:
        self._inbox.put(_Add(tuple(seqs)))

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End sequences before the next step, that is, within one prefill chunk."""
        self._inbox.put(_Abort(tuple(seq_ids)))

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """Keep only the first `num_tokens` of a sequence in the prefix cache, once the sequence has ended."""
        self._inbox.put(_Keep(seq, num_tokens))

    def wake(self) -> None:
        """Tell the engine that images for which rows wait are ready."""
        self._inbox.put(_Wake())

    def inspect(self, ask: Callable[[Engine], T]) -> "Future[T]":
        """Call `ask` between two steps. The future may be cancelled; it fails with EngineDead once the thread ends."""
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
        threading.Event().wait()  # MLX aborts a process that exits soon after a thread that used it, so this one stays

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
        """Answer questions in the inbox with an error. A caller that asks after the end calls this itself."""
        while True:
            try:
                message = self._inbox.get(block=False)
            except Empty:
                return
            if isinstance(message, _Inspect) and message.answer.set_running_or_notify_cancel():
                message.answer.set_exception(error)

    def _take_messages(self, engine: Engine) -> bool:
        """Handle all messages. Without work, wait for one first. Returns False after a stop message."""
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
        return  # it was cancelled; from here on it cannot be cancelled
    with Fence("the engine, whose caller reads the error", is_logged=False) as fence:
        answer.set_result(ask(engine))
    if fence.error is not None:
        answer.set_exception(fence.error)


def _nobody_listens(_: object) -> None:
    """Stand in for a callback until `listen`."""
