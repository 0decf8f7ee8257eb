"""Every way a checkpoint can be wrong is one line that says what to do."""

import json
import shutil

import pytest

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.runner.checkpoint import find_checkpoint


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of a checkpoint to damage."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


def message(model) -> str:
    with pytest.raises(ModelLoadError) as caught:
        start_engine(EngineConfig(model=str(model), memory_budget_bytes=1 << 30))
    text = caught.value.message
    assert "\n" not in text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nowhere", "nowhere"])
def test_a_wrong_path(name):
    assert f"No folder {name}" in message(name)


def test_a_model_that_is_not_here_while_offline():
    assert "could not be downloaded" in message("some-org/some-model")


def test_an_impossible_name():
    assert "valid Hugging Face id" in message("what is/this?!")


def test_a_folder_that_is_no_checkpoint(tmp_path):
    assert "config.json" in message(tmp_path)


def test_a_damaged_config(broken):
    (broken / "config.json").write_text("{")
    assert "not valid JSON" in message(broken)


def test_an_unknown_architecture(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "hal9000"}))
    assert "'hal9000'" in message(broken)


def test_no_weights(broken):
    (broken / "model.safetensors").unlink()
    assert "safetensors" in message(broken)


def test_truncated_weights(broken):
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "Cannot load" in message(broken)


def test_weights_of_another_shape(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    assert "Cannot load" in message(broken)


def test_no_tokenizer(broken):
    for file in broken.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in message(broken)


def test_remote_code_is_not_run_unless_trusted(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_file": "model.py"}))
    (broken / "model.py").write_text("raise SystemExit('ran')")
    assert "trust" in message(broken)


def test_the_context_window_is_read_where_the_architecture_keeps_it(checkpoint):
    assert find_checkpoint(str(checkpoint("llama"))).max_model_len == 65536
    assert find_checkpoint(str(checkpoint("qwen3_5"))).max_model_len == 65536
