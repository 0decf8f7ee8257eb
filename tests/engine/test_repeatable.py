"""With `repeatable`, a request gives the same reply bit for bit: alone, beside others, and whatever the clock says."""

import itertools
import random
import time

import pytest

from tests.support.engine_driver import Driver, RandomPrompts
from tests.support.rows import cases
from vllm_mlx.core.events import TokenLogprob
from vllm_mlx.core.request import TokenSampling

prompt = RandomPrompts(3)
PROMPT = prompt(400)
SAMPLING = TokenSampling(temperature=0.8, seed=5, num_top_logprobs=2)
LogprobsOfReply = list[TokenLogprob | None]


def ask(driver: Driver, *, others: int = 0) -> LogprobsOfReply:
    """The reply to PROMPT beside others: some decode before it comes, some prefill beside it, some share its start."""
    for number in range(others):
        driver.add(prompt(50 + 90 * number), max_tokens=40)
        driver.step()
    seq_id = driver.add(PROMPT, max_tokens=24, sampling=SAMPLING)
    for number in range(others):
        driver.add([*PROMPT[: 200 + number], *prompt(60)], max_tokens=10)
    driver.run()
    return driver.replies[seq_id].logprobs


def unsteady_clock(seed: int):
    """A clock that hurries and dawdles, so that measured chunks take any time."""
    jumps = random.Random(seed)
    now = itertools.accumulate(10 ** jumps.uniform(-6, -0.5) for _ in itertools.count())
    return lambda: next(now)


@pytest.fixture(params=cases(["qwen3", "nemotron_h"], ["nemotron_h"]))
def folder(request, checkpoint):
    return checkpoint(request.param, dtype="bfloat16")


def test_a_reply_is_the_same_alone_beside_others_and_under_any_clock(folder, monkeypatch):
    settings = {"repeatable": True, "max_stall_ms": 50}
    alone = ask(Driver(folder, **settings))
    assert ask(Driver(folder, **settings), others=3) == alone
    for seed in range(1):
        monkeypatch.setattr(time, "perf_counter", unsteady_clock(seed))
        driver = Driver(folder, **settings)
        assert ask(driver, others=1) == alone
        assert ask(driver) == alone, "nothing is kept of the same request"


def test_a_preempted_row_continues_with_the_same_bits(folder, monkeypatch):
    monkeypatch.setattr("vllm_mlx.scheduler.memory_pool.RESERVED_OUTPUT", 0)
    driver = Driver(folder, repeatable=True)
    alone = ask(driver)
    driver = Driver(folder, repeatable=True, rows_bytes=2 * driver.engine.default.facts.footprint.bytes_at(412))
    driver.add(prompt(400), max_tokens=30)
    assert ask(driver) == alone
    assert sum(seq.num_preemptions for seq in driver.seqs.values())


def test_without_it_bits_differ(checkpoint):
    """The reason for the setting: in half precision, rounding depends on the tokens that run together.

    On a CPU only the scan of Mamba2 layers shows it. On Metal every architecture does.
    """
    folder = checkpoint("nemotron_h", dtype="bfloat16")
    assert ask(Driver(folder), others=1) != ask(Driver(folder))
