"""A model that cannot be loaded, beside one that serves: its own requests get the error, and no bytes stay taken."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import plain_loop
from tests.support.rows import cases
from tests.support.running import eventually
from tests.support.unloading import HeldLoading
from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import EngineConfig, ModelConfig
from vllm_mlx.core.errors import ModelLoadError, ModelUnavailable
from vllm_mlx.engine.engine import LLMEngine
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.runner.model import Model

from .test_several_models import Serving, prompt_of

NUM_TOKENS = 40


class NoMemory(HeldLoading):
    """Fails at its second part as a device without memory does."""

    num_parts = 0

    def advance(self) -> Model | None:
        self.num_parts += 1
        if self.num_parts == 2:
            raise ModelLoadError("The weights cannot be read.") from RuntimeError(
                "[malloc] Unable to allocate 9 bytes."
            )
        return self._loading.advance()


def change_loads(make: Callable[..., Any], released: threading.Event) -> Callable[[LLMEngine], None]:
    """Loads of the second model go through `make`."""

    def change(engine: LLMEngine) -> None:
        model = engine.models[1]
        begin = model.assembly.begin
        model.assembly = replace(model.assembly, begin=lambda: make(begin(), released))

    return change


HARMS = ("changed", "truncated", "missing", "folder", "no memory")


def harm_files(harm: str, path: Path) -> None:
    [weights] = path.glob("model*.safetensors")
    match harm:
        case "changed":
            (path / "config.json").write_text((path / "config.json").read_text() + "\n")
        case "truncated" | "cut":
            weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        case "missing":
            weights.unlink()
        case "folder":
            path.rename(path.with_name("elsewhere"))


@dataclass
class Pair:
    """A model that serves, and one that is unloaded and may be harmed."""

    path: Path
    served: Serving
    runner: asyncio.Runner

    def taken_bytes(self) -> list[int]:
        return [row["weights_bytes"] for row in self.runner.run(self.served.rows())]

    def check(self, work: Callable[[], Coroutine[Any, Any, object]]) -> object:
        """Return the result of `work`, or its error. The first model replies meanwhile as alone, and no bytes stay."""
        client = self.served.client
        [taken_bytes, _] = self.taken_bytes()
        expected = [plain_loop(checkpoint("qwen3"), prompt_of(number), NUM_TOKENS)[0] for number in range(3)]
        assert self.runner.run(self._replies()) == expected
        self.runner.run(client.clear_cache())
        active_bytes = mx.get_active_memory()

        async def beside() -> tuple[list[list[int]], object]:
            replies = asyncio.create_task(self._replies())
            while not (await self.served.rows())[0]["running"] and not replies.done():
                await asyncio.sleep(0)
            [result] = await asyncio.gather(work(), return_exceptions=True)
            return await replies, result

        replies, result = self.runner.run(beside())
        assert replies == expected
        assert self.taken_bytes() == [taken_bytes, 0] and client.is_healthy
        assert self.runner.run(client.status())["memory"]["lacking_bytes"] == 0
        self.runner.run(client.clear_cache())
        eventually(lambda: mx.get_active_memory() <= active_bytes + 65536)
        return result

    async def _replies(self) -> list[list[int]]:
        asked = (self.served.ask(0, prompt_of(number), NUM_TOKENS) for number in range(3))
        return [reply for reply, _ in await asyncio.gather(*asked)]

    async def loading(self) -> None:
        """Wait until the second model is being loaded."""
        while self.served.client.state_of(1) != "loading":
            await asyncio.sleep(0)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    path = Path(shutil.copytree(checkpoint("qwen3_5"), tmp_path_factory.mktemp("harmed") / "model"))
    paths = (str(checkpoint("qwen3")), str(path))
    models = Catalogue(tuple(Entry(config=ModelConfig(model=each, max_model_len=1024), name=each) for each in paths))
    config = EngineConfig(model=paths[0], memory_budget_bytes=2 << 30)
    with asyncio.Runner() as runner:
        made = Pair(path, Serving(start_engine(config, None, models)), runner)
        try:
            yield made
        finally:
            runner.run(made.served.client.shutdown(0))


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """The second model is unloaded. After the test it is whole again."""
    client, runner = shared.served.client, shared.runner
    assembly = runner.run(client.ask(lambda engine: engine.models[1].assembly))
    runner.run(client.unload_model(1, wait=True))
    yield shared
    shutil.copytree(checkpoint("qwen3_5"), shared.path, dirs_exist_ok=True)
    runner.run(client.ask(lambda engine: setattr(engine.models[1], "assembly", assembly)))
    runner.run(client.load_model(1, wait=True))


@pytest.mark.parametrize("harm", cases(HARMS, ["changed", "folder", "no memory"]))
def test_a_load_that_fails(pair: Pair, harm: str) -> None:
    if harm == "no memory":
        pair.runner.run(pair.served.client.ask(change_loads(NoMemory, threading.Event())))
    else:
        harm_files(harm, pair.path)
    refused = pair.check(lambda: pair.served.ask(1, prompt_of(5)))
    assert isinstance(refused, ModelUnavailable)
    assert pair.runner.run(pair.served.rows())[1]["state"] == "failed"


def test_a_file_that_is_cut_while_it_is_read(pair: Pair) -> None:
    released = threading.Event()
    pair.runner.run(pair.served.client.ask(change_loads(HeldLoading, released)))

    async def cut() -> object:
        asked = asyncio.create_task(pair.served.ask(1, prompt_of(5)))
        await pair.loading()
        harm_files("cut", pair.path)
        released.set()
        return await asked

    assert isinstance(pair.check(cut), ModelUnavailable)


def test_a_load_that_is_given_up(pair: Pair) -> None:
    released = threading.Event()
    pair.runner.run(pair.served.client.ask(change_loads(HeldLoading, released)))

    async def give_up() -> None:
        await pair.served.client.load_model(1, wait=False)
        await pair.loading()
        await pair.served.client.unload_model(1, wait=True)

    assert pair.check(give_up) is None
    released.set()
    expected = plain_loop(pair.path, prompt_of(5), 10)[0]
    assert pair.runner.run(pair.served.ask(1, prompt_of(5)))[0] == expected
