"""Weights that were damaged in place, where size and time of the file say nothing: the load fails, nothing is kept."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import plain_loop
from tests.support.unloading import FIRST, NUM_TOKENS, serving
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ModelLoadError, ModelUnavailable
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import load_model

NOT_A_NUMBER, INFINITE, ZERO = b"\xff\xff\xff\x7f", b"\x00\x00\x80\x7f", bytes(4)  # float32
DAMAGES = [
    pytest.param("qwen3", "", NOT_A_NUMBER, id="everything"),
    pytest.param("qwen3", "", ZERO, id="a hole in the file"),
    pytest.param("qwen3", "layers.1.mlp.down_proj", NOT_A_NUMBER, id="one layer"),
    pytest.param("qwen3", "model.norm", INFINITE, id="infinite"),
    pytest.param("qwen3_5", "linear_attn.A_log", NOT_A_NUMBER, id="a recurrent layer", marks=pytest.mark.full),
    pytest.param("gpt_oss", "self_attn.sinks", NOT_A_NUMBER, id="sinks", marks=pytest.mark.full),
    pytest.param("vision:qwen3_vl", "model.norm", NOT_A_NUMBER, id="beside a vision encoder", marks=pytest.mark.full),
]


@contextmanager
def damaged(path: Path, part: str, value: bytes) -> Iterator[None]:
    """Overwrite the tensors whose names have this part, and put them back at the end."""
    [file] = path.glob("model*.safetensors")
    times, kept = file.stat(), file.read_bytes()
    start = 8 + int.from_bytes(kept[:8], "little")
    data = bytearray(kept)
    found = [entry for name, entry in json.loads(kept[8:start]).items() if part in name and name != "__metadata__"]
    assert found and all(entry["dtype"] == "F32" for entry in found)
    for low, high in (entry["data_offsets"] for entry in found):
        data[start + low : start + high] = value * ((high - low) // len(value))
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    yield
    file.write_bytes(kept)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    return lambda architecture: Path(shutil.copytree(checkpoint(architecture), tmp_path / "model"))


@pytest.mark.parametrize(("architecture", "part", "value"), DAMAGES)
def test_a_reload_fails_and_no_state_of_it_is_written(
    copied: Callable[[str], Path], tmp_path: Path, architecture: str, part: str, value: bytes
) -> None:
    path = copied(architecture)
    with serving(path, tmp_path / "kept") as served:
        served.unload()
        with damaged(path, part, value):
            for _ in range(2):
                with pytest.raises(ModelUnavailable, match="its weights are damaged"):
                    served.ask(FIRST)
        status = served.status()
        assert served.row()["state"] == "failed" and "damaged" in served.row()["cause"]
        taken, kept = status["memory"], status["cache"]["disk"]
        assert taken["weights_bytes"] == taken["cache_bytes"] == kept.num_records == kept.num_waiting_bytes == 0
        served.load()
        assert served.ask(FIRST)[0] == plain_loop(checkpoint(architecture), FIRST, NUM_TOKENS)[0]


@pytest.mark.parametrize(("architecture", "part", "value"), DAMAGES)
def test_a_server_does_not_start_with_it(
    copied: Callable[[str], Path], architecture: str, part: str, value: bytes
) -> None:
    path = copied(architecture)
    with damaged(path, part, value), pytest.raises(ModelLoadError, match=r"its weights are damaged.* files complete"):
        start_engine(EngineConfig(model=str(path), max_model_len=2048))


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")])
def test_a_model_may_let_some_tokens_never_come(value: float) -> None:
    """Logits of minus infinity are masks of its own. Any other single logit that is not finite is damage."""
    model = load_model(find_checkpoint(str(checkpoint("qwen3"))), trust_remote_code=False)
    forward = model.forward

    def changed(*arguments: Any) -> mx.array:
        logits = forward(*arguments)
        logits[:, -1, 3:9] = value
        return logits

    model.forward = changed  # type: ignore[method-assign]
    with nullcontext() if value < 0 else pytest.raises(ValueError, match="damaged"):
        model.check_logits()
