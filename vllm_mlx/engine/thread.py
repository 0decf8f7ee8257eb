"""The one thread, owner of MLX, that runs the engine. Other threads only send messages, handled between two steps."""

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from ..core.errors import EngineDead
from ..core.sequence import Sequence
from ..util.fence import Fence
from ..util.tasks import call_at_exit, raise_in, settle
from .engine import Deliver, LLMEngine
from .lane import ServedModel

logger = logging.getLogger(__name__)
T = TypeVar("T")
_EXIT_S = 60.0  # at the end of the process, for the running step or the part of loading that cannot be interrupted


@dataclass(frozen=True, slots=True)
class _Question:
    """A question of another thread, which waits for the answer."""

    ask: Callable[[LLMEngine], object]
    answer: "Future[object]"


_Message = Callable[[LLMEngine], None] | _Question | None  # with None, the thread stops


class EngineThread:
    """Runs one engine on a thread of its own. `models` are known after `start`; other threads only read them."""

    models: tuple[ServedModel, ...]

    def __init__(self, load: Callable[[], LLMEngine]):
        self._load = load
        self._deliver: Deliver = _nobody_listens
        self._died: Callable[[EngineDead], None] = _nobody_listens
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._loaded: Future[tuple[ServedModel, ...]] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ended = threading.Event()
        self._save_until_s = 0.0  # by the monotonic clock
        self._end: EngineDead | None = None  # set once no message is handled any more
        self.step_started_s: float | None = None  # start of the running step, by the monotonic clock
        self.error: EngineDead | None = None  # why the thread ended, unless `stop` ended it

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def start(self) -> None:
        """Load on the engine thread and wait for it. Raises the error of loading."""
        call_at_exit(self._end_with_process)
        self._thread.start()
        self.models = self._loaded.result()

    def listen(self, deliver: Deliver, died: Callable[[EngineDead], None]) -> None:
        """Set what the thread calls with updates and when it dies, before any sequence is added."""
        self._deliver, self._died = deliver, died

    def check_alive(self) -> None:
        """Raise EngineDead if the thread has ended by an error."""
        if self.error is not None:
            raise self.error

    def add(self, seqs: Items[Sequence]) -> None:
        self._inbox.put(lambda engine: engine.add(seqs))

    def abort(self, seq_ids: Items[int]) -> None:
        """End sequences before the next step, that is, within one prefill chunk."""
        self._inbox.put(lambda engine: engine.abort(seq_ids))

    def keep(self, seq: Sequence, num_tokens: int) -> None:
        """Keep only the first `num_tokens` of a sequence in the prefix cache, once the sequence has ended."""
        self._inbox.put(lambda engine: engine.keep(seq, num_tokens))

    def wake(self) -> None:
        """Step again: images for which rows wait are ready, or the disk threads have results to collect."""
        self._inbox.put(LLMEngine.wake)

    def inspect(self, ask: Callable[[LLMEngine], T]) -> "Future[T]":
        """Call `ask` between two steps. The future may be cancelled; it fails with EngineDead once the thread ends."""
        answer: Future[T] = Future()
        self._inbox.put(_Question(ask, answer))  # type: ignore[arg-type]
        if self._end is not None:
            self._refuse_questions(self._end)
        return answer

    def stop(self, timeout_s: float | None = None, save_s: float = 0.0) -> None:
        """End the thread and wait for its end. For `save_s` more, it may write state that is not on disk yet.

        A second call may leave it less time.
        """
        self._save_until_s = time.monotonic() + save_s
        self._inbox.put(None)
        self._ended.wait(None if timeout_s is None else timeout_s + save_s)

    def fail(self, error: EngineDead) -> None:
        """Count as ended, though the thread may never come back, so that requests get this error. Any thread calls."""
        self.error = self._end = error
        self._ended.set()
        self._died(error)
        self._refuse_questions(error)

    def _end_with_process(self) -> None:
        """Stop the thread's use of MLX before Python ends, even in the middle of loading."""
        if not self._loaded.done():
            raise_in(self._thread, SystemExit)
        self.stop(_EXIT_S)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()
        threading.Event().wait()  # MLX aborts a process that exits soon after a thread that used it, so this one stays

    def _work(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        engine.wake_on_news(self.wake)
        self._loaded.set_result(engine.models)
        try:
            is_idle = False
            while self._take_messages(engine, engine.idle_s if is_idle and not engine.is_busy else 0.0):
                self.step_started_s = time.monotonic()
                if is_idle := not engine.has_work:
                    engine.yield_memory(self._deliver)
                else:
                    engine.step(self._deliver)
                engine.move(self._deliver)
                self.step_started_s = None
        except BaseException as error:
            logger.exception("The engine thread ended")
            message = f"The engine has stopped: {type(error).__name__}: {error}. Restart the server."
            self.error = self.error or (error if isinstance(error, EngineDead) else EngineDead(message))
            self._died(self.error)
        with Fence("the end of the process"):
            try:
                engine.close(self._rest_s, self._deliver)
            finally:
                engine.free()
        self._end = self.error or EngineDead("The engine has been shut down.")
        self._refuse_questions(self._end)

    def _rest_s(self) -> float:
        return 0.0 if self.error is not None else self._save_until_s - time.monotonic()

    def _refuse_questions(self, error: EngineDead) -> None:
        """Answer questions in the inbox with an error. A caller that asks after the end calls this itself."""
        while True:
            try:
                message = self._inbox.get(block=False)
            except Empty:
                return
            if isinstance(message, _Question) and message.answer.set_running_or_notify_cancel():
                message.answer.set_exception(error)

    def _take_messages(self, engine: LLMEngine, wait_s: float) -> bool:
        """Wait up to `wait_s` for a message, and handle all. Returns False after a stop message."""
        while True:
            try:
                message = self._inbox.get(wait_s > 0, wait_s)
            except Empty:
                return True
            match message:
                case None:
                    return False
                case _Question(ask, answer):
                    settle(answer, partial(engine.ask, ask, self._deliver))
                case act:
                    act(engine)
            wait_s = 0.0


def _nobody_listens(_: object) -> None:
    """Stand in for a callback until `listen`."""
