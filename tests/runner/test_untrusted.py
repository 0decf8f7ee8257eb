"""A checkpoint is data: nothing in it runs unless asked for."""

import json
import shutil

import pytest

from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.runner.checkpoint import find_checkpoint


@pytest.mark.parametrize("name", ["qwen3", "vision:qwen3_5"])
def test_code_that_comes_along_needs_a_word(checkpoint, tmp_path, name):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint(name), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "evil.py"}))
    (folder / "evil.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    with pytest.raises(ModelLoadError, match=r"own Python code \(evil.py\).*--trust-remote-code"):
        find_checkpoint(str(folder))
    assert find_checkpoint(str(folder), trust_remote_code=True).path == folder
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_as_that(tmp_path, file):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / file).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelLoadError, match=f"only as {file}.*convert it to safetensors"):
        find_checkpoint(str(tmp_path))
