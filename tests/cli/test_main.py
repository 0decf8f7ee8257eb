"""The command as a user meets it: a process, its exit code, and what it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import call, refusal
from tests.support.rows import row
from vllm_mlx import __version__
from vllm_mlx.cli.settings import POSITIONAL, flag_name, settings_fields


def test_version() -> None:
    result = call("--version")
    assert result.returncode == 0 and re.fullmatch(rf"vllm-mlx {__version__}( \(commit [0-9a-f]+\))?\n", result.stdout)


@row("S4-36")
def test_help_names_every_flag() -> None:
    words = set(re.findall(r"--[a-z-]+", call("serve", "--help-all").stdout))
    expected = {flag_name(name) for name, _, _ in settings_fields() if name not in POSITIONAL}
    assert expected - {"--join"} | {"--config", "--help"} <= words  # --join is a worker's


def test_a_wrong_flag_is_one_line_and_exit_code_2() -> None:
    line = "vllm-mlx: --slow-client-s must be a number, got 'soon'."
    assert refusal("serve", "--slow-client-s", "soon", code=2).startswith(line)


def test_a_file_that_is_missing_is_no_wrong_command_line() -> None:
    line = "vllm-mlx: Cannot read the config file none.toml: No such file"
    assert refusal("serve", "--config", "none.toml").startswith(line)


def test_a_name_that_no_model_has_brings_similar_ones() -> None:
    line = call("serve", "Qwen3.5-9B", "--port", "0").stderr.splitlines()[-1]
    assert "No folder Qwen3.5-9B" in line and "Similar names: mlx-community/Qwen3.5-9B-MLX-4bit" in line


def test_a_gguf_file_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for given in (tmp_path, tmp_path / "model.gguf", "gone.gguf"):
        line = call("serve", str(given), "--port", "0").stderr.splitlines()[-1]
        assert "is a GGUF file; this server loads MLX checkpoints." in line and "mlx-community" in line


def test_an_unknown_flag_is_a_usage_error_that_names_the_nearest() -> None:
    result = call("serve", "--prot", "1")
    assert result.returncode == 2
    assert "--prot" in result.stderr
    assert "--port" in result.stderr


HEAVY = "mlx mlx_lm numpy transformers tokenizers huggingface_hub fastapi uvicorn"
HELP = "try: vllm_mlx.cli.main.make_app()(['serve', '--help'])\nexcept SystemExit: pass"
LISTEN = "import vllm_mlx.server.run\nvllm_mlx.cli.main.make_app()"  # a port is checked before a model is loaded


@pytest.mark.parametrize(("code", "heavy"), [(HELP, HEAVY), (LISTEN, "mlx mlx_lm transformers")], ids=["help", "port"])
def test_nothing_heavy_is_imported_before_it_is_needed(code: str, heavy: str) -> None:
    code = f"import sys, vllm_mlx.cli.main\n{code}\nsys.exit(','.join({set(heavy.split())} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
