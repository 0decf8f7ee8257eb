"""The end of a process that uses the Python API: no thread is inside of MLX when Python ends."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.running import start_python

LOADING = """
import sys
from vllm_mlx import LLM
from vllm_mlx.engine import loading

def slowly(*given):
    print("loading", flush=True)
    for _ in range(200):
        measured = load(*given)
    return measured

load, loading.load_measured = loading.load_measured, slowly
LLM({path!r})
"""
ASKING = """
from vllm_mlx import LLM, SamplingParams

def ask():
    llm = LLM({path!r})
    while True:
        llm.generate("Hello", SamplingParams(max_tokens=1000, ignore_eos=True))

print("asking", flush=True)
ask()
"""
PLAIN = """
import sys
from vllm_mlx import LLM, SamplingParams

llm = LLM({path!r}, cache_disk_bytes=1 << 20, cache_dir={folder!r})
llm.generate("Hello world, and more", SamplingParams(max_tokens=2))
sys.exit(7)
"""


def _run(code: str) -> tuple[int, str, str]:
    process = start_python(code)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_the_exit_code_is_the_programs_own_and_what_it_computed_is_kept(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    code, _, err = _run(PLAIN.format(path=str(checkpoint("qwen3")), folder=str(tmp_path)))
    assert (code, err) == (7, "")
    assert [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 1000]


def _interrupt(code: str, word: str, after_s: float) -> tuple[int, str]:
    process = start_python(code)
    assert process.stdout is not None and process.stdout.readline() == f"{word}\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    return process.returncode, err.splitlines()[-1]


INTERRUPTED = (-signal.SIGINT, "KeyboardInterrupt")  # as Python ends after Ctrl-C; a shell shows it as 130


@pytest.mark.parametrize("code", [pytest.param(LOADING, marks=pytest.mark.full), ASKING], ids=["loading", "asking"])
def test_ctrl_c_ends_loading_and_asking_as_it_ends_any_program(checkpoint: Callable[..., Path], code: str) -> None:
    word = "loading" if code is LOADING else "asking"
    assert _interrupt(code.format(path=str(checkpoint("qwen3"))), word, 0.5) == INTERRUPTED


@pytest.mark.full
@pytest.mark.parametrize("moment", range(10))
def test_ctrl_c_at_any_moment_of_loading(checkpoint: Callable[..., Path], moment: int) -> None:
    assert _interrupt(LOADING.format(path=str(checkpoint("qwen3"))), "loading", moment / 5) == INTERRUPTED
