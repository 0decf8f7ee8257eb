"""An engine whose weights leave and come back, and ways to hold it in each state of its model."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mlx.api.replies import FoldedChoice
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ModelBusy, ModelLoadError, ModelUnavailable
from vllm_mlx.core.events import Failed
from vllm_mlx.core.request import Request, SamplingParams
from vllm_mlx.engine.client import EngineClient
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.loading import open_disk, start_engine
from vllm_mlx.runner.loading import Loading
from vllm_mlx.runner.model import Model

FIRST = [7 + (5 * place * place + 3 * place) % 180 for place in range(700)]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, skip_special_tokens=False)


@dataclass
class Serving:
    """An engine whose calls wait for their ends."""

    client: EngineClient
    loop: asyncio.AbstractEventLoop
    num_asked: int = 0

    def ask(self, prompt: list[int], sampling: SamplingParams = GREEDY) -> tuple[list[int], int]:
        """Return the reply, and how many tokens of the prompt were cached. Raises the error that ends it."""
        return self.loop.run_until_complete(self.reply(prompt, sampling))

    async def reply(self, prompt: list[int], sampling: SamplingParams = GREEDY) -> tuple[list[int], int]:
        self.num_asked += 1
        choice = FoldedChoice()
        request = Request(request_id=f"asked-{self.num_asked}", prompt=tuple(prompt), sampling=sampling)
        async with await self.client.submit(request) as generation:
            async for _, event in generation:
                if isinstance(event, Failed):
                    raise event.error
                choice.feed(event)
        usage = choice.finished.usage
        return [entry.token_id for entry in choice.logprobs or ()], usage.cached_tokens

    def unload(self) -> None:
        """Unload the model once what the last reply left is done."""
        while True:
            try:
                return self.loop.run_until_complete(self.client.unload_model(0, wait=True))
            except ModelBusy:
                self.loop.run_until_complete(asyncio.sleep(0.01))

    def load(self) -> None:
        self.loop.run_until_complete(self.client.load_model(0, wait=True))

    def status(self) -> dict[str, Any]:
        return dict(self.loop.run_until_complete(self.client.status()))

    def row(self) -> dict[str, Any]:
        [row] = self.status()["models"]
        return row


@contextmanager
def serving(path: Path, folder: Path | None = None, **settings: Any) -> Iterator[Serving]:
    """Serve a checkpoint, with a cache on disk if there is a `folder`."""
    disk_bytes = 0 if folder is None else 1 << 30
    settings = {"max_model_len": 2048, "cache_dir": str(folder), "cache_disk_bytes": disk_bytes, **settings}
    config = EngineConfig(model=str(path), **settings)
    loop = asyncio.new_event_loop()
    served = Serving(start_engine(config, open_disk(config)), loop)
    try:
        yield served
    finally:
        loop.run_until_complete(served.client.shutdown(0))
        loop.close()


class HeldLoading:
    """Reads nothing until it is released."""

    def __init__(self, loading: Loading[Model], released: threading.Event):
        self._loading, self._released = loading, released

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loading, name)

    def advance(self) -> Model | None:
        if self._released.is_set():
            return self._loading.advance()
        time.sleep(0.001)
        return None


def hold(served: Serving, state: str) -> Callable[[], None]:
    """Bring the model into a state, and keep it there until the result is called."""
    released = threading.Event()
    if state == "leaving":
        _write_slowly(served, released)
        served.loop.run_until_complete(served.client.unload_model(0, wait=False))
    elif state != "ready":
        served.unload()
    if state in ("loading", "failed"):
        served.loop.run_until_complete(
            served.client.ask(lambda engine: hold_loads(engine, released, fails=state == "failed"))
        )
    if state == "loading":
        served.loop.run_until_complete(served.client.load_model(0, wait=False))
    if state == "failed":
        served.loop.run_until_complete(_failing(served))
    assert served.client.state_of(0) == state
    return released.set


def _write_slowly(served: Serving, released: threading.Event) -> None:
    """Keep the thread that writes busy, so that what a reply leaves waits to be written."""

    def wait(engine: LLMEngine) -> None:
        assert engine.disk is not None
        engine.disk.store.threads.write(released.wait, lambda error: None)

    served.loop.run_until_complete(served.client.ask(wait))
    served.ask([served.num_asked, *range(100)])  # a prompt that is not on disk yet
    served.loop.run_until_complete(served.client.ask(lambda engine: None))
    while served.loop.run_until_complete(served.client.ask(lambda engine: engine.scheduler.has_work)):
        pass


def hold_loads(engine: LLMEngine, released: threading.Event, *, fails: bool = False) -> None:
    """Loads wait, or fail, until they are released. Called on the engine thread."""
    begin = engine.default.assembly.begin

    def held() -> Any:
        if fails and not released.is_set():
            raise ModelLoadError("The test lets no model load.")
        return HeldLoading(begin(), released)

    engine.default.assembly.begin = held  # type: ignore[method-assign]


async def _failing(served: Serving) -> None:
    try:
        await served.client.load_model(0, wait=True)
    except ModelUnavailable:
        return
    raise AssertionError("a load that fails is an error")
