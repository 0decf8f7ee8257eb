"""The README's lines, pasted in order where only the wheel is installed, outside of the clone."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uv

from tests.project.sources import ROOT
from tests.support.commands import address, served

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README, re.DOTALL)
SERVE = "scripts/serve"
NOT_PASTED = {
    r"scripts/test\b": "needs the clone",
    r"git clone ": "the address is not known here",
    r"scripts/install\b": "needs the clone; tests/project/test_scripts.py",
    r"vllm-mlx serve [m~]": "needs a large model",
    r"vllm-mlx chat --model": "needs a large model; tests/cli/test_own_server.py",
    r"vllm-mlx serve coder=": "needs large models; tests/cli/test_model_list.py",
    r"npm install ": "needs the agent's vendor",
    r"cd ": "is the reader's own project",
    r"vllm-mlx launch claude( --model.*)?$": "needs the agent; tests/cli/test_launch.py",
}
LARGE = "mlx-community/Qwen3.5-9B-MLX-4bit"
IN_HOME = ["bash", "-c", 'cd "$HOME" && exec vllm-mlx "$@"', "vllm-mlx"]


def lines() -> Iterator[str]:
    """Yield each command of the README, without its comment, and each block of Python."""
    for language, block in BLOCKS:
        if language == "python":
            yield f"python\n{block}"
            continue
        for line in block.replace("\\\n", " ").splitlines():
            yield line.partition(" #")[0].strip()


def is_pasted(line: str) -> bool:
    return not any(re.match(pattern, line) for pattern in NOT_PASTED)


def test_each_line_is_pasted_or_has_a_reason_that_still_holds() -> None:
    every = list(lines())
    assert [pattern for pattern in NOT_PASTED if not any(re.match(pattern, line) for line in every)] == []
    pasted = [line.split()[0] for line in every if is_pasted(line)]
    assert pasted == ["vllm-mlx", SERVE, "curl", "python", "vllm-mlx", "python"]


def test_the_models_by_memory_are_those_that_doctor_recommends() -> None:
    table = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    doctor = dict(re.findall(r"^\| (\d+ GB) \| [\d.]+ GB \| (`[^`]+`)", table, re.MULTILINE))
    rows = re.findall(r"^\| (\d+ GB) \| (`[^`]+`) \|$", README, re.MULTILINE)
    assert [doctor[memory] for memory, _ in rows] == [model for _, model in rows]
    assert len(rows) == 6 and any(f"--model {model.strip('`')} " in README for _, model in rows)


class Installed:
    """A new environment with the locked packages and the wheel, and an empty home folder."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "venv/bin"
        self.home = folder / "home"
        self.home.mkdir()
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
        subprocess.run(build, cwd=ROOT, check=True)
        [wheel] = (folder / "dist").glob("*.whl")
        install = [uv.find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--python", str(self.bin / "python")]
        lock = ["--require-hashes", "-r", str(ROOT / "scripts/requirements.lock")]
        subprocess.run([uv.find_uv_bin(), "venv", "--python", sys.executable, str(folder / "venv")], check=True)
        for what in (lock, [str(wheel)]):
            subprocess.run([*install, *what], check=True)
        self.variables = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.home)}

    def paste(self, line: str, port: str = "8000") -> str:
        """Run a line of the README in the new environment. Return what it printed."""
        here = line.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace(LARGE, "demo")
        command = ["bash", "-c", here]
        if here.startswith("python\n"):  # the client's package is only in the tests' environment
            program = sys.executable if "from openai" in here else str(self.bin / "python")
            command = [program, "-c", here.removeprefix("python\n")]
        environment = {**os.environ, **self.variables, "VLLM_MLX_PORT": port}
        result = subprocess.run(command, cwd=self.home, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"
        return result.stdout


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a wheel names the commit of a clone")
def test_the_lines_of_the_readme_work_from_the_wheel(tmp_path: Path) -> None:
    """Takes the locked packages from uv's cache, or from the package index of this machine."""
    installed = Installed(tmp_path)
    revision = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.run(revision, capture_output=True, text=True, check=True).stdout.strip()
    assert installed.paste("vllm-mlx --version").endswith(f" (commit {commit})\n")
    assert str(installed.bin.parent) in installed.paste("python\nimport vllm_mlx; print(vllm_mlx.__file__)")
    with served(command=IN_HOME, **installed.variables) as (_, started):
        port = address(started).rpartition(":")[2]
        printed = {line: installed.paste(line, port) for line in lines() if is_pasted(line) and line != SERVE}
        page = httpx.get(address(started), headers={"accept": "text/html"}, timeout=60).text
    assert page.lstrip().lower().startswith("<!doctype html")
    doctor, reply, sdk, script, llm = printed.values()
    assert '"content":"I am Tiny' in reply
    assert "✗" not in doctor and "cold and cached replies are equal" in doctor
    assert sdk.startswith("2 + 3 = 5\n") and "get_weather" in sdk and "Paris" in sdk
    assert address(started) in script and "claude" in script
    assert len(llm.splitlines()) >= 2
