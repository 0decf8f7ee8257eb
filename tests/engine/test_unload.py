"""A model leaves memory and comes back, and nobody but the memory notices."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import plain_loop
from tests.support.unloading import FIRST, NUM_TOKENS, Serving, hold_loads, serving
from vllm_mlx.core.errors import ContextLengthExceeded, ModelBusy, ModelUnavailable
from vllm_mlx.core.request import SamplingParams


@pytest.mark.parametrize(
    ("architecture", "has_disk"),
    [
        pytest.param("qwen3", False, id="qwen3-tree", marks=pytest.mark.full),
        pytest.param("qwen3_5", True, id="qwen3_5-disk"),
        pytest.param("qwen3", True, id="qwen3-disk", marks=pytest.mark.full),
        pytest.param("qwen3_5", False, id="qwen3_5-tree", marks=pytest.mark.full),
    ],
)
def test_a_conversation_goes_on_after_unload_and_reload(architecture: str, has_disk: bool, tmp_path: Path) -> None:
    path = checkpoint(architecture)
    longer = [*FIRST, 11, 12, 13, 14]
    with serving(path, tmp_path if has_disk else None) as served:
        assert served.ask(FIRST)[0] == plain_loop(path, FIRST, NUM_TOKENS)[0]
        served.unload()
        status = served.status()
        assert served.row()["state"] == "unloaded" and status["memory"]["weights_bytes"] == 0
        assert (status["memory"]["cache_bytes"] == 0) == has_disk, "what is on disk leaves memory too"
        reply, num_cached = served.ask(longer)
        assert reply == plain_loop(path, longer, NUM_TOKENS)[0]
        assert num_cached >= 0.99 * len(FIRST)
        row = served.row()
        assert row["state"] == "ready" and row["loads"] == {"start": 1, "request": 1, "command": 0}


def test_an_invalid_request_is_refused_without_a_load() -> None:
    with serving(checkpoint("qwen3")) as served:
        served.unload()
        with pytest.raises(ContextLengthExceeded):
            served.ask([1] * 3000)
        assert served.row()["state"] == "unloaded" and served.row()["loads"]["request"] == 0


def test_load_and_unload_by_command_may_be_repeated() -> None:
    with serving(checkpoint("qwen3")) as served:
        weights = served.status()["memory"]["weights_bytes"]
        for _ in range(2):
            served.unload()
            assert served.client.state_of(0) == "unloaded"
        for _ in range(2):
            served.load()
            assert served.client.state_of(0) == "ready"
        assert served.row()["loads"] == {"start": 1, "request": 0, "command": 1}
        memory = served.status()["memory"]
        assert memory["weights_bytes"] == weights and memory["lacking_bytes"] == 0


def test_a_model_without_requests_leaves_by_itself() -> None:
    with serving(checkpoint("qwen3"), idle_unload_s=0.01) as served:
        served.ask(FIRST)
        while served.client.state_of(0) != "unloaded":
            served.loop.run_until_complete(asyncio.sleep(0.01))
        assert served.ask(FIRST)[0] == plain_loop(checkpoint("qwen3"), FIRST, NUM_TOKENS)[0]


def test_a_busy_model_stays_and_says_what_runs() -> None:
    async def asked(served: Serving) -> str:
        running = asyncio.create_task(served.reply(FIRST, SamplingParams(max_tokens=1000, ignore_eos=True)))
        while not (await served.client.status())["requests"]:
            await asyncio.sleep(0)
        with pytest.raises(ModelBusy) as refused:
            await served.client.unload_model(0, wait=True)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return refused.value.message

    with serving(checkpoint("qwen3")) as served:
        assert "asked-1" in served.loop.run_until_complete(asked(served))


@pytest.mark.parametrize("harm", ["changed", "truncated", "missing", "folder"])
def test_a_checkpoint_that_is_no_longer_the_same_is_refused_with_the_cause(harm: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))
    [weights] = path.glob("model*.safetensors")
    with serving(path) as served:
        served.unload()
        kept = weights.read_bytes()
        match harm:
            case "changed":
                (path / "config.json").write_text((path / "config.json").read_text() + "\n")
            case "truncated":
                weights.write_bytes(kept[: len(kept) // 2])
            case "missing":
                weights.unlink()
            case "folder":
                path.rename(tmp_path / "elsewhere")
        for _ in range(2):
            with pytest.raises(ModelUnavailable, match="on disk") as refused:
                served.ask(FIRST)
            assert 20 < refused.value.retry_after_s <= 30, "the second one is refused without another attempt"
        status = served.status()
        assert status["memory"]["weights_bytes"] == 0 and status["memory"]["lacking_bytes"] == 0
        assert served.row()["state"] == "failed" and "on disk" in served.row()["cause"]
        assert served.row()["loads"]["request"] == 1


def test_memory_that_the_device_refuses_fails_the_load_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(checkpoint("qwen3")) as served:
        served.unload()
        active = mx.get_active_memory()
        with monkeypatch.context() as patch:

            def refuse(*_: Any) -> None:
                raise RuntimeError("[malloc] Unable to allocate 3221225472 bytes.")

            patch.setattr(mx, "eval", refuse)
            with pytest.raises(ModelUnavailable, match="no memory for the weights"):
                served.ask(FIRST)
        assert served.status()["memory"]["weights_bytes"] == 0 and mx.get_active_memory() <= active + 65536
        served.load()
        assert served.ask(FIRST)[0] == plain_loop(checkpoint("qwen3"), FIRST, NUM_TOKENS)[0]


def test_a_question_is_answered_between_two_slices() -> None:
    released = threading.Event()

    async def loaded(served: Serving) -> None:
        await served.client.ask(lambda engine: hold_loads(engine, released))
        await served.client.load_model(0, wait=False)
        for _ in range(2):
            assert await served.client.ask(lambda engine: engine.default.state) == "loading"
        released.set()
        await served.client.load_model(0, wait=True)

    with serving(checkpoint("qwen3")) as served:
        served.unload()
        served.loop.run_until_complete(loaded(served))
        assert served.row()["state"] == "ready"


def test_a_file_that_is_cut_while_it_is_read_gives_all_bytes_back(tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))
    [weights] = path.glob("model*.safetensors")
    released = threading.Event()
    with serving(path) as served:
        served.unload()
        active = mx.get_active_memory()
        served.loop.run_until_complete(served.client.ask(lambda engine: hold_loads(engine, released)))
        asked = served.loop.create_task(served.reply(FIRST))
        while served.status()["memory"]["weights_bytes"] == 0:
            pass
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        released.set()
        with pytest.raises(ModelUnavailable, match="are all files complete"):
            served.loop.run_until_complete(asked)
        status = served.status()
        assert status["memory"]["weights_bytes"] == 0 and status["memory"]["lacking_bytes"] == 0
        assert mx.get_active_memory() <= active + 65536 and served.client.is_healthy


@pytest.mark.full
@pytest.mark.parametrize("has_disk", [False, True], ids=["tree", "disk"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
def test_a_long_conversation_goes_on_as_if_nothing_had_happened(
    architecture: str, has_disk: bool, tmp_path: Path
) -> None:
    prompt = [7 + (5 * place * place + 3 * place) % 180 for place in range(20_000)]
    folder = tmp_path if has_disk else None
    with serving(checkpoint(architecture), folder, max_model_len=24_000) as served:
        reply, _ = served.ask(prompt)
        continued = [*prompt, *reply, 11, 12, 13, 14]
        expected, _ = served.ask(continued)
        served.unload()
        assert (served.status()["memory"]["cache_bytes"] == 0) == has_disk
        again, num_cached = served.ask(continued)
        assert again == expected and num_cached >= 0.99 * len(continued)
