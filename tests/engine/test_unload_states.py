"""Whatever happens while a model comes or leaves: each reply is as alone, or ends with the documented error."""

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import plain_loop
from tests.support.failing_device import INTERACTIVITY
from tests.support.unloading import FIRST, NUM_TOKENS, Serving, hold, serving
from vllm_mlx.core.errors import ModelBusy, ModelUnavailable, Overloaded, ShuttingDown
from vllm_mlx.core.request import SamplingParams
from vllm_mlx.engine.engine import LLMEngine

STATES = ["ready", "leaving", "unloaded", "loading", "failed"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(checkpoint("qwen3"), tmp_path_factory.mktemp("kept")) as running:
        yield running


@pytest.fixture
def served(shared: Serving) -> Iterator[Serving]:
    yield shared
    shared.load()


def replies_as_alone(served: Serving) -> bool:
    return served.ask(FIRST)[0] == plain_loop(checkpoint("qwen3"), FIRST, NUM_TOKENS)[0]


def run_while_held(served: Serving, work: asyncio.Task[object]) -> None:
    """Let a request get as far as it can while the model is held."""

    async def wait() -> None:
        while not work.done():
            requests = (await served.client.status())["requests"]
            if [request["waits_for"] for request in requests] == ["model"]:
                return
            await asyncio.sleep(0.005)

    served.loop.run_until_complete(wait())


@pytest.mark.parametrize("state", STATES)
def test_a_request(served: Serving, state: str) -> None:
    before = served.row()["loads"]
    release = hold(served, state)
    asked = served.loop.create_task(served.reply(FIRST))
    run_while_held(served, asked)
    assert state != "loading" or not asked.done()
    release()
    if state == "failed":
        with pytest.raises(ModelUnavailable, match="lets no model load"):
            served.loop.run_until_complete(asked)
        served.load()
        assert replies_as_alone(served)
        return
    reply, _ = served.loop.run_until_complete(asked)
    assert reply == plain_loop(checkpoint("qwen3"), FIRST, NUM_TOKENS)[0]
    loads = {cause: num - before[cause] for cause, num in served.row()["loads"].items()}
    assert loads["request"] == (state == "unloaded") and loads["command"] == (state == "loading")


@pytest.mark.parametrize("state", STATES)
def test_a_client_that_leaves(served: Serving, state: str) -> None:
    release = hold(served, state)
    asked = served.loop.create_task(served.reply(FIRST))
    run_while_held(served, asked)
    asked.cancel()
    served.loop.run_until_complete(asyncio.gather(asked, return_exceptions=True))
    while served.row()["waiting"]:
        pass
    release()
    served.load()
    assert replies_as_alone(served)


@pytest.mark.parametrize("state", STATES)
def test_an_unload(served: Serving, state: str) -> None:
    release = hold(served, state)
    served.loop.run_until_complete(served.client.unload_model(0, wait=False))
    release()
    served.unload()
    assert served.client.state_of(0) == ("failed" if state == "failed" else "unloaded")
    assert served.status()["memory"]["weights_bytes"] == 0
    served.load()
    assert replies_as_alone(served)


@pytest.mark.parametrize("state", STATES)
def test_a_load(served: Serving, state: str) -> None:
    release = hold(served, state)
    if state == "failed":
        with pytest.raises(ModelUnavailable):
            served.load()
    else:
        served.loop.run_until_complete(served.client.load_model(0, wait=state != "loading"))
        assert served.client.state_of(0) == ("loading" if state == "loading" else "ready")
    release()
    served.load()
    assert served.client.state_of(0) == "ready" and replies_as_alone(served)


@pytest.mark.parametrize("state", STATES)
def test_a_shutdown(tmp_path: Path, state: str) -> None:
    with serving(checkpoint("qwen3"), tmp_path) as served:
        release = hold(served, state)
        asked = served.loop.create_task(served.reply(FIRST))
        run_while_held(served, asked)
        release() if state == "leaving" else None
        served.loop.run_until_complete(served.client.shutdown(0))
        [end] = served.loop.run_until_complete(asyncio.gather(asked, return_exceptions=True))
    assert isinstance(end, tuple | ModelUnavailable | ShuttingDown)
    if state == "loading":
        assert isinstance(end, ShuttingDown)


def fail(engine: LLMEngine) -> None:
    raise RuntimeError(INTERACTIVITY)


@pytest.mark.parametrize("state", STATES)
def test_a_device_fault(served: Serving, state: str) -> None:
    release = hold(served, state)
    with pytest.raises(RuntimeError):
        served.loop.run_until_complete(served.client.ask(fail))
    release()
    served.load()
    assert replies_as_alone(served) and served.client.is_healthy


def begun(served: Serving, command: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begin a command that waits, and let it get as far as it can."""
    waiting = served.loop.create_task(command)
    for _ in range(3):
        served.status()
    assert not waiting.done()
    return waiting


def test_a_load_that_waits_ends_with_the_server(tmp_path: Path) -> None:
    with serving(checkpoint("qwen3"), tmp_path) as served:
        hold(served, "loading")
        waiting = begun(served, served.client.load_model(0, wait=True))
        served.loop.run_until_complete(served.client.shutdown(0))
        with pytest.raises(ShuttingDown):
            served.loop.run_until_complete(asyncio.wait_for(waiting, 60))


def test_a_load_by_command_goes_on_after_a_device_fault(served: Serving) -> None:
    release = hold(served, "loading")
    waiting = begun(served, served.client.load_model(0, wait=True))
    with pytest.raises(RuntimeError):
        served.loop.run_until_complete(served.client.ask(fail))
    release()
    served.loop.run_until_complete(waiting)
    assert served.client.state_of(0) == "ready" and replies_as_alone(served)


def test_a_load_that_an_unload_gives_up_says_so(served: Serving) -> None:
    release = hold(served, "loading")
    waiting = begun(served, served.client.load_model(0, wait=True))
    served.loop.run_until_complete(served.client.unload_model(0, wait=True))
    with pytest.raises(Overloaded, match="unloaded again"):
        served.loop.run_until_complete(waiting)
    release()


def test_a_load_that_ends_by_an_error_of_our_own_says_why(served: Serving) -> None:
    def spoil(engine: LLMEngine, run: Any) -> Any:
        assembly = engine.default.assembly
        before, assembly.run = assembly.run, run  # type: ignore[method-assign]
        return before

    def fail_to_run(model: Any) -> Any:
        raise TypeError("no runner today")

    served.unload()
    run = served.loop.run_until_complete(served.client.ask(lambda engine: spoil(engine, fail_to_run)))
    with pytest.raises(ModelUnavailable, match="no runner today"):
        served.load()
    assert served.client.state_of(0) == "failed" and served.status()["memory"]["weights_bytes"] == 0
    served.loop.run_until_complete(served.client.ask(lambda engine: spoil(engine, run)))


def test_an_unload_says_what_came_before_the_weights_had_left(served: Serving) -> None:
    release = hold(served, "leaving")
    waiting = begun(served, served.client.unload_model(0, wait=True))
    asked = served.loop.create_task(served.reply(FIRST, SamplingParams(max_tokens=1000, ignore_eos=True)))
    with pytest.raises(ModelBusy, match="asked-"):
        served.loop.run_until_complete(waiting)
    asked.cancel()
    served.loop.run_until_complete(asyncio.gather(asked, return_exceptions=True))
    release()
