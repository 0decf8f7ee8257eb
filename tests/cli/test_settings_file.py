"""Settings that are written are read as they were given. `test_service.py` has a row for each of them."""

from pathlib import Path

from vllm_mlx.cli.options import load_settings
from vllm_mlx.cli.service import texts

LIST = """
port = 1234
[[models]]
model = "demo"
name = "coder"
match = ["claude-*"]
max-model-len = 4096
pin = true
[[models]]
model = "org/small"
text_only = true
"""


def test_a_list_of_models_is_written(tmp_path: Path) -> None:
    file, again = tmp_path / "models.toml", tmp_path / "again.toml"
    file.write_text(LIST)
    written, keys = texts(load_settings({"api_key": ["sk-1"]}, file))
    again.write_text(written)
    assert load_settings({}, again) == load_settings({}, file) and keys == 'api_key = ["sk-1"]\n'
