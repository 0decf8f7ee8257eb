"""A fault on the engine thread: who was at fault ends with an error, all others get the reply they would have got."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_driver import Driver
from tests.support.integrity import check_integrity
from tests.support.rows import cases, row
from vllm_mlx.cache import tree
from vllm_mlx.cache.tree import MemoryAwarePrefixCache
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import Sequence
from vllm_mlx.runner.batch import Batch
from vllm_mlx.runner.runner import Runner
from vllm_mlx.scheduler.scheduler import Scheduler

from .faults import SHARED, InjectedFault, failing, faults

PROMPTS = [[(13 * row + 5 * place) % 500 for place in range(20 + 9 * row)] for row in range(4)]
SETTINGS = (
    TokenSampling(temperature=0),
    TokenSampling(temperature=1.2, seed=77),
    TokenSampling(temperature=0, presence_penalty=1.5, frequency_penalty=0.5),
    TokenSampling(temperature=0, num_top_logprobs=2),
)
LENGTH = 18


@pytest.fixture(scope="module", params=cases(["qwen3", "nemotron_h", "gpt_oss"], ["qwen3"]))
def path(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(request.param)


def start(driver: Driver) -> list[int]:
    return [driver.add(ids, LENGTH, setting) for ids, setting in zip(PROMPTS, SETTINGS, strict=True)]


def tokens(driver: Driver, seq_ids: list[int]) -> list[list[int]]:
    return [driver.replies[seq_id].token_ids for seq_id in seq_ids]


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    driver = Driver(path)
    return [
        driver.generate([ids], max_tokens=LENGTH, sampling=setting)[0]
        for ids, setting in zip(PROMPTS, SETTINGS, strict=True)
    ]


def is_at_rest(driver: Driver) -> bool:
    check_integrity(driver.engine.cache_tree)
    driver.engine.clear_cache()
    assert not driver.engine.cache_tree.used_bytes, "nothing is pinned"
    assert not any(driver.engine.scheduler._groups.is_isolated(seq_id) for seq_id in driver.seqs)
    return driver.engine.num_rows == 0 and not driver.engine.has_work


PASSING = [  # seam, calls that go well, steps before
    *(pytest.param(seam, after, 6, marks=[pytest.mark.full] * (after != 1)) for seam in SHARED for after in (0, 1, 7)),
    ("arrangement", 3, 6),
    ("step", 3, 6),
    ("step", 0, 0),
    ("plan", 0, 0),
]


@pytest.mark.parametrize(("seam", "after", "num_steps"), PASSING)
def test_a_fault_that_passes_is_noticed_by_nobody(
    path: Path, expected: list[list[int]], seam: str, after: int, num_steps: int
) -> None:
    """Of a batch of several, of a whole step whose work is lost, or of one that was to restore what is kept."""
    driver = Driver(path)
    for ids in PROMPTS[:2] if not num_steps else ():
        driver.generate([ids], max_tokens=2)
    with faults() as planned:
        seq_ids = start(driver)
        for _ in range(num_steps):
            driver.step()
        planned.plan(seam, after=after, done_first=seam == "arrangement")
        driver.run()
    assert planned.num_struck == 1
    assert seam not in SHARED or driver.engine.report().lanes[0].num_restarts == len(PROMPTS)
    assert all(driver.replies[seq_id].error is None for seq_id in seq_ids)
    assert tokens(driver, seq_ids) == expected
    assert len(driver.replies[seq_ids[3]].logprobs) == LENGTH
    assert is_at_rest(driver)


def test_at_any_moment_of_their_replies(path: Path, expected: list[list[int]]) -> None:
    """The last sample of a row is read when it has no batch any more."""
    driver = Driver(path)
    for after in (0, 1, 5, LENGTH - 2, LENGTH - 1, LENGTH):
        with faults() as planned:
            seq_ids = start(driver)
            planned.plan("read", after=after)
            driver.run()
        assert bool(planned.num_struck) == (after < LENGTH)
        for index, seq_id in enumerate(seq_ids):
            reply = driver.replies[seq_id]
            assert reply.token_ids == expected[index] or (reply.error and reply.token_ids == expected[index][:after])
    assert is_at_rest(driver)


@pytest.mark.parametrize("is_named", [False, True])
def test_the_row_at_fault_fails_alone(path: Path, expected: list[list[int]], is_named: bool) -> None:
    """A fault that names its row touches no other, however often it comes; one of a batch is looked for."""
    driver, num_broken = Driver(path), []

    def is_bad(struck: Any, *named: Sequence) -> bool:
        seqs = named or struck.seqs
        first = 0 if is_named else len(PROMPTS[1]) + 6
        is_struck = any(seq.sampling.seed == 77 and seq.num_computed_tokens >= first for seq in seqs)
        num_broken.extend([len(seqs)] * is_struck)
        return is_struck

    with failing(Runner, "_start", is_bad) if is_named else failing(Batch, "forward", is_bad):
        seq_ids = start(driver)
        driver.run()
    assert set(num_broken) == {1} if is_named else num_broken == [4, 1]
    assert driver.engine.report().lanes[0].num_restarts == (0 if is_named else len(PROMPTS))
    bad = driver.replies[seq_ids[1]]
    assert bad.error is not None and bad.token_ids == expected[1][: len(bad.token_ids)]
    assert tokens(driver, [seq_ids[row] for row in (0, 2, 3)]) == [expected[row] for row in (0, 2, 3)]
    assert is_at_rest(driver)


def test_a_row_that_joined_before_another_ones_fault_showed_begins_again_as_well(
    path: Path, expected: list[list[int]]
) -> None:
    """What a step has launched is read one step later: by then the batch may have grown."""
    driver = Driver(path)
    assert driver.generate([PROMPTS[1]], max_tokens=LENGTH, sampling=SETTINGS[1]) == [expected[1]]
    with faults() as planned:
        early = driver.add(PROMPTS[0], LENGTH, SETTINGS[0])
        for _ in range(8):
            driver.step()
        late = driver.add(PROMPTS[1], LENGTH, SETTINGS[1])  # all of it is kept: it decodes at once
        planned.plan("read")
        driver.step()
        assert planned.num_struck == 1
        assert driver.engine.report().lanes[0].num_restarts == 1
        driver.run()
    assert driver.replies[early].error is not None
    assert driver.replies[early].token_ids == expected[0][: len(driver.replies[early].token_ids)]
    assert tokens(driver, [late]) == [expected[1]]
    assert is_at_rest(driver)


def test_a_row_that_has_gone_is_not_set_apart(path: Path, expected: list[list[int]]) -> None:
    driver = Driver(path)
    with faults() as planned:
        seq_ids = start(driver)
        for _ in range(6):
            driver.step()
        driver.engine.abort([seq_ids[0]])
        planned.plan("read")  # of what was launched while it was here
        driver.run()
    assert planned.num_struck == 1
    assert driver.engine.report().lanes[0].num_restarts == len(PROMPTS) - 1
    assert tokens(driver, seq_ids[1:]) == expected[1:]
    assert is_at_rest(driver)


def test_tokens_that_were_taken_and_not_told_end_their_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that went on would lack them; one that has just ended would never be told."""
    driver = Driver(path, max_num_seqs=5)
    seq_ids = [*start(driver), driver.add(PROMPTS[0], 3), driver.add(PROMPTS[0], 3)]
    works = Scheduler._take_tokens

    def torn(self: Scheduler, outputs: Any) -> Any:
        updates = works(self, outputs)
        if any(update.finish_reason for update in updates):
            raise InjectedFault
        return updates

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_take_tokens", torn)
        while not any(reply.error for reply in driver.replies.values()):
            driver.step()
    assert all(driver.replies[seq_id].error for seq_id in seq_ids)
    again = start(driver)
    driver.run()
    assert all(driver.replies[seq_id].error is None for seq_id in again)
    assert is_at_rest(driver)


@pytest.mark.parametrize("place", [(MemoryAwarePrefixCache, "match"), (tree, "pieces_up_to")], ids=["all", "half way"])
def test_a_look_up_that_fails_pins_nothing(path: Path, expected: list[list[int]], place: tuple[Any, str]) -> None:
    """The prompts begin from nothing."""
    driver = Driver(path)
    driver.generate([PROMPTS[0]], max_tokens=2)
    with failing(*place):
        seq_ids = start(driver)
        driver.run()
    assert tokens(driver, seq_ids) == expected
    assert is_at_rest(driver)


@row("S4-26")
@pytest.mark.parametrize("name", ["common_length", "make_room"])
def test_what_cannot_be_kept_is_not(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row ends, or gives way for a while: both plan to keep what it computed."""
    roomy = Driver(path)
    driver = Driver(path, rows_bytes=2 * roomy.engine.default.facts.footprint.bytes_at(240))
    monkeypatch.setattr("vllm_mlx.scheduler.memory_pool.RESERVED_OUTPUT", 0)
    prompts = [(ids * 12)[:220] for ids in PROMPTS[:3]]
    with failing(MemoryAwarePrefixCache, name, lambda *_: any(seq.num_output_tokens for seq in driver.seqs.values())):
        seq_ids = [driver.add(ids, 60) for ids in prompts]
        driver.run()
    assert driver.engine.report().lanes[0].num_preemptions
    assert tokens(driver, seq_ids) == [roomy.generate([ids], max_tokens=60)[0] for ids in prompts]
    assert is_at_rest(driver)


def test_of_several_faults_of_whole_steps_each_ends_the_youngest_row_at_most(
    path: Path, expected: list[list[int]]
) -> None:
    driver = Driver(path)
    with faults() as planned:
        seq_ids = start(driver)
        for _ in range(3):
            for _ in range(5):
                driver.step()
            planned.plan("step")
        driver.run()
    assert planned.num_struck == 3
    assert [bool(driver.replies[seq_id].error) for seq_id in seq_ids] == [False, False, True, True]
    assert tokens(driver, seq_ids[:2]) == expected[:2]
    assert is_at_rest(driver)


@pytest.mark.parametrize("cleared", [False, True])
def test_what_a_row_took_from_the_cache_is_told_of_the_start_that_counted(path: Path, cleared: bool) -> None:
    driver = Driver(path)
    driver.generate([PROMPTS[1]], max_tokens=4)
    with faults() as planned:
        early = driver.add(PROMPTS[0], LENGTH)
        for _ in range(6):
            driver.step()
        late = driver.add(PROMPTS[1], LENGTH)
        planned.plan("step")
        driver.step()
        assert planned.num_struck == 1
        if cleared:
            driver.engine.clear_cache()
        driver.run()
    assert driver.replies[early].error is None
    assert driver.seqs[late].num_cached_tokens == (0 if cleared else len(PROMPTS[1]) - 1)


def test_steps_that_always_fail_end_every_request(path: Path) -> None:
    driver = Driver(path, max_num_seqs=2)
    seq_ids = start(driver)
    with failing(Batch, "forward"):
        for _ in range(40):
            if driver.engine.has_work:
                driver.step()
    assert all(driver.replies[seq_id].error is not None for seq_id in seq_ids)
    assert is_at_rest(driver)
