"""Processes that try grammars: each grammar gets its own verdict, also where such a process is killed or stopped."""

import json
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.guidance.grammar_compiler import GrammarCompiler, GrammarTrials

from .random_sampler import sampler

GOOD, NONE = 'start: "a"', "start: nothing"
# It stands before the real library: a trial is killed as soon as it has written its answer.
KILLED = """
import os, signal, sys
del sys.modules[__name__]
sys.path.remove(os.path.dirname(os.path.dirname(__file__)))
import llguidance
os._exit = lambda status: os.kill(os.getpid(), signal.SIGKILL)
"""


def compiler() -> GrammarCompiler:
    tokenizer = sampler().tokenizer
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def verdict(compiler: GrammarCompiler, grammar: str, tenant: str = "") -> str:
    try:
        compiler.compile(json.dumps({"grammars": [{"lark_grammar": grammar}]}), "x", tenant)
    except InvalidParameter as error:
        return error.message
    return ""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Return the processes that are started from now on."""
    found: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: object, **options: object):
            super().__init__(*arguments, **options)  # type: ignore[call-overload]
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return found


def test_a_trial_that_is_killed_after_its_answer_shifts_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llguidance").mkdir()
    (tmp_path / "llguidance/__init__.py").write_text(KILLED)
    one = compiler()
    one.read_vocabulary()
    monkeypatch.syspath_prepend(tmp_path)
    assert verdict(one, GOOD) == "" and "nothing" in verdict(one, NONE) and verdict(one, f'{GOOD} "b"') == ""


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_a_process_that_was_killed_or_hangs_while_it_is_idle_costs_no_error(
    started: list[subprocess.Popen[bytes]], sent: signal.Signals
) -> None:
    one = compiler()
    trials = GrammarTrials(one.tokens, max_s=15)
    assert trials.num_bytes(GOOD, "x") > 0
    [idle] = started
    idle.send_signal(sent)
    with pytest.raises(InvalidParameter, match="nothing"):
        trials.num_bytes(NONE, "x")
    assert trials.num_bytes(GOOD, "x") > 0 and len(started) == 2 and idle.poll() == -signal.SIGKILL


def test_two_threads_never_get_one_process(started: list[subprocess.Popen[bytes]]) -> None:
    tokens, together = compiler().tokens, threading.Barrier(2)

    def switch(frame: FrameType, event: str, argument: object) -> Any:
        """Let another thread run before each step of the method."""
        if frame.f_code.co_name == "num_bytes":
            frame.f_trace_opcodes = True
            time.sleep(1e-5)
            return switch
        return None

    def ask(trials: GrammarTrials) -> int:
        together.wait()
        return trials.num_bytes(GOOD, "x")

    threading.settrace(switch)
    try:
        with ThreadPoolExecutor(2) as pool:
            for _ in range(3):
                trials = GrammarTrials(tokens)
                assert trials.num_bytes(GOOD, "x") > 0  # one process is idle now
                assert all(pool.map(ask, [trials] * 2))
    finally:
        threading.settrace(None)
    assert len(started) == 6
