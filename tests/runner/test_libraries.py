"""Loading mlx-lm changes nothing of the process."""

import resource
import subprocess
import sys

import pytest


@pytest.mark.parametrize("most", [1000, pytest.param(None, marks=pytest.mark.full)], ids=["few", "the usual number"])
def test_loading_leaves_the_limit_of_open_files(most: int | None) -> None:
    hard = most or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))\n"
    code += "import vllm_mlx.runner.model\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"100 {hard}\n", "")
