"""A GPU fault is everyone's: whatever fails, no reply is wrong, and nothing wrong is kept for a later turn."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from tests.support.checkpoints import ARCHITECTURES, PARTLY_ROTARY
from tests.support.engine_driver import Driver
from tests.support.failing_device import INTERACTIVITY, NO_BUFFER, OUT_OF_MEMORY, failing_device
from tests.support.integrity import check_integrity
from tests.support.rows import cases
from tests.support.vision_families import FAMILIES
from vllm_mlx.core.errors import EngineDead
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.engine.engine import LLMEngine

from .vision_harness import VisionModel

_random = random.Random(5)
TALK, SHORT, LONG = ([_random.randrange(500) for _ in range(length)] for length in (50, 9, 150))
HOT = TokenSampling(temperature=1.2, seed=77)
LENGTH = 9
SETTINGS = {"max_prefill_chunk": 48, "snapshot_every": 32, "max_stall_ms": 20_000}  # no clock has a say
NEXT_WORDS = [3, 1, 4]


@dataclass
class Outcome:
    replies: list[list[int]]
    errors: list[bool]
    later: list[list[int]]
    submissions: list[str]
    num_failed: int


def play(
    path: Path,
    failing: Iterable[int] = (),
    *,
    replies: list[list[int]] | None = None,
    predictions: list[list[int]] | None = None,
    **fault: object,
) -> Outcome:
    """A talk of two turns, a short and a long prompt beside it, and a later turn of each, which no fault disturbs.

    `replies`: what the later turns continue. None: the replies of this play. `predictions`: drafts of the replies.
    """
    driver = Driver(path, **SETTINGS, num_draft_tokens=0 if predictions is None else 3)
    driver.may_restart |= bool(failing := list(failing))
    drafts = [{"prediction": tuple(ids)} for ids in predictions or [[]] * 4]
    with failing_device(driver.engine.runner) as device:
        device.fail(failing, **fault)
        first = driver.add(TALK, 4, points=(20,), **drafts[0])
        driver.run()
        answer = driver.replies[first].token_ids if replies is None else replies[0]
        seq_ids = [first, driver.add([*TALK, *answer, *NEXT_WORDS], LENGTH, **drafts[1])]
        driver.step()
        seq_ids.append(driver.add(SHORT, LENGTH - 2, HOT, **drafts[2]))
        driver.step()
        driver.step()
        seq_ids.append(driver.add(LONG, LENGTH, **drafts[3]))
        driver.run()
        submissions = list(device.submissions)
        device.fail(())
    done = [driver.replies[seq_id] for seq_id in seq_ids]
    prompts = [TALK, [*TALK, *answer, *NEXT_WORDS], SHORT, LONG]
    told = [reply.token_ids for reply in done] if replies is None else replies
    later = driver.generate(
        [[*ids, *reply, *NEXT_WORDS] for ids, reply in zip(prompts, told, strict=True)], max_tokens=6
    )
    assert driver.engine.num_rows == 0
    return Outcome([reply.token_ids for reply in done], [reply.error is not None for reply in done], later, submissions,
                   device.num_failed)  # fmt: skip


@lru_cache
def undisturbed(path: Path) -> Outcome:
    return play(path)


def check(path: Path, numbers: Iterable[int], **fault: object) -> None:
    """A play in which one submission fails ends like one without."""
    clean = undisturbed(path)
    for number in numbers:
        outcome = play(path, [number], replies=clean.replies, **fault)
        seam = f"submission {number}, {clean.submissions[number]}"
        assert outcome.num_failed == 1, seam
        assert outcome.replies == clean.replies and not any(outcome.errors), seam
        assert outcome.later == clean.later, seam


@pytest.mark.parametrize("name", cases(ARCHITECTURES, ["gemma3_text", "qwen3_5"]))
def test_one_failed_submission_changes_no_reply_and_no_later_turn(checkpoint: Callable[..., Path], name: str) -> None:
    path = checkpoint(name)
    submissions = undisturbed(path).submissions
    assert {"launch", "chunk", "capture", "restore", "join", "leave", "probe"} <= set(submissions)
    check(path, range(ARCHITECTURES.index(name) + 2, len(submissions), 60))


@pytest.mark.parametrize("name", ["qwen3", "nemotron_h"])
def test_nor_if_the_error_is_known_only_when_the_work_ends(checkpoint: Callable[..., Path], name: str) -> None:
    path = checkpoint(name)
    check(path, launches(path)[1::16], is_late=True)


@pytest.mark.parametrize(
    ("name", "is_late"),
    [
        ("qwen3", True),
        pytest.param("qwen3", False, marks=pytest.mark.full),
        pytest.param("vision:qwen3_5", True, marks=pytest.mark.full),
        pytest.param("vision:qwen3_5", False, marks=pytest.mark.full),
    ],
)
def test_nor_with_drafts(checkpoint: Callable[..., Path], name: str, is_late: bool) -> None:
    path = checkpoint(name)
    clean = undisturbed(path)
    predictions = [[token if place % 4 != 2 else 499 for place, token in enumerate(reply)] for reply in clean.replies]
    drafted = play(path, predictions=predictions)
    assert drafted.replies == clean.replies and drafted.later == clean.later
    numbers = [number for number, seam in enumerate(drafted.submissions) if seam == "verify"]
    assert len(numbers) > 4
    for number in numbers[1::6]:
        outcome = play(path, [number], replies=clean.replies, predictions=predictions, is_late=is_late)
        assert outcome.num_failed == 1
        assert outcome.replies == clean.replies and not any(outcome.errors)
        assert outcome.later == clean.later


def test_without_the_check_of_each_step_a_late_error_makes_replies_wrong(checkpoint: Callable[..., Path]) -> None:
    """The simulation is as unkind as the device: no other call hears of the error before the tokens are sent."""
    path = checkpoint("qwen3")
    clean = undisturbed(path)
    plays = [
        play(path, [number], replies=clean.replies, is_late=True, has_probe=False) for number in launches(path)[::4]
    ]
    assert any(outcome.replies != clean.replies for outcome in plays)


def launches(path: Path) -> list[int]:
    return [number for number, seam in enumerate(undisturbed(path).submissions) if seam == "launch"]


ANY = [*ARCHITECTURES, *PARTLY_ROTARY, *(f"vision:{family}" for family in FAMILIES)]
FAULTS: list[tuple[list[str], int, dict[str, object]]] = [  # architectures, every which submission fails, and how
    (ANY, 1, {}),
    (ARCHITECTURES, 7, {"is_late": True}),
    *((["qwen3", "nemotron_h"], 1, {"token": token}) for token in (5000, -1)),
    *((["qwen3", "nemotron_h", "gemma3_text"], 1, {"text": text}) for text in (OUT_OF_MEMORY, NO_BUFFER)),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "every", "fault"), [(name, every, fault) for names, every, fault in FAULTS for name in names]
)
def test_nor_does_any_other(checkpoint: Callable[..., Path], name: str, every: int, fault: dict[str, object]) -> None:
    path = checkpoint(name)
    check(path, range(ANY.index(name) % every, len(undisturbed(path).submissions), every), **fault)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3", "nemotron_h", "gemma3_text", "qwen3_5"])
def test_several_faults_end_some_replies_at_most(checkpoint: Callable[..., Path], name: str) -> None:
    path = checkpoint(name)
    clean = undisturbed(path)
    for seed in range(40):
        drawn = random.Random(seed)
        numbers = drawn.sample(range(len(clean.submissions)), drawn.randint(2, 5))
        text = drawn.choice([INTERACTIVITY, OUT_OF_MEMORY, NO_BUFFER])
        try:
            outcome = play(path, numbers, replies=clean.replies, text=text)
        except EngineDead:
            continue  # three faults in a row
        for reply, right, has_failed in zip(outcome.replies, clean.replies, outcome.errors, strict=True):
            assert reply == (right[: len(reply)] if has_failed else right), (seed, numbers, text)
        assert outcome.later == clean.later, (seed, numbers, text)


def test_a_failed_read_tells_no_token_that_no_model_samples(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("qwen3")
    check(path, launches(path)[2::12], token=5000)


@pytest.mark.parametrize(("name", "text"), [("qwen3", OUT_OF_MEMORY), ("nemotron_h", NO_BUFFER)])
def test_a_chunk_without_memory_runs_again_at_half_its_length(
    checkpoint: Callable[..., Path], name: str, text: str
) -> None:
    driver = Driver(checkpoint(name), max_stall_ms=20_000, max_prefill_chunk=512)
    prompt = [*LONG, *LONG, *LONG, *TALK]
    expected = driver.generate([SHORT, prompt], max_tokens=LENGTH)
    driver.engine.clear_cache()
    with failing_device(driver.engine.runner) as device:
        beside = driver.add(SHORT, LENGTH)
        driver.step()
        driver.step()
        device.fail_next("chunk", 2, text)
        long = driver.add(prompt, LENGTH)
        driver.run()
    assert [driver.replies[seq_id].token_ids for seq_id in (beside, long)] == expected
    report = driver.engine.report().lanes[0]
    assert device.num_failed == 2 and report.num_shortened >= 2
    assert report.num_restarts == 2, "no other row restarts"


def test_a_row_for_which_even_the_shortest_chunk_has_no_memory_fails_alone(checkpoint: Callable[..., Path]) -> None:
    driver = Driver(checkpoint("qwen3"))
    expected = driver.generate([SHORT, TALK], max_tokens=2 * LENGTH)
    driver.engine.clear_cache()
    with failing_device(driver.engine.runner) as device:
        beside = driver.add(SHORT, 2 * LENGTH)
        driver.step()
        driver.step()
        device.fail_next("chunk", 100, OUT_OF_MEMORY)
        long = driver.add(LONG, LENGTH)
        driver.run()
    error = driver.replies[long].error
    assert error is not None and "no memory" in str(error) and device.num_failed < 10
    assert driver.replies[beside].token_ids == expected[0]
    assert driver.generate([TALK], max_tokens=2 * LENGTH) == [expected[1]]


def test_three_faults_without_a_good_step_end_the_engine(checkpoint: Callable[..., Path]) -> None:
    driver = Driver(checkpoint("qwen3"))
    with failing_device(driver.engine.runner) as device:
        driver.add(SHORT, LENGTH)
        driver.add(TALK, LENGTH)
        device.fail(range(1000))
        with pytest.raises(EngineDead, match=r"failed 3 times in a row.*Impacting Interactivity"):
            driver.run()
    assert not any(reply.token_ids for reply in driver.replies.values())


def test_faults_with_good_steps_in_between_end_nothing(checkpoint: Callable[..., Path]) -> None:
    driver = Driver(checkpoint("qwen3"))
    expected = driver.generate([TALK], max_tokens=40)
    driver.engine.clear_cache()
    with failing_device(driver.engine.runner) as device:
        seq_id = driver.add(TALK, 40)
        for _ in range(6):
            told = len(driver.replies[seq_id].token_ids)
            while len(driver.replies[seq_id].token_ids) < told + 3:
                driver.step()
            device.fail_next("launch", 1, INTERACTIVITY)
        driver.run()
    assert [driver.replies[seq_id].token_ids] == expected and driver.replies[seq_id].error is None


def test_a_row_that_meets_fault_after_fault_without_a_token_ends(checkpoint: Callable[..., Path]) -> None:
    """Its own work may be the cause. The others go on, so the engine does."""
    driver = Driver(checkpoint("qwen3"), max_prefill_chunk=64, prefix_cache=False)
    expected = driver.generate([SHORT], max_tokens=40)
    with failing_device(driver.engine.runner) as device:
        beside = driver.add(SHORT, 40)
        driver.step()
        driver.step()
        bad = driver.add(LONG, LENGTH)
        while driver.replies[bad].error is None:
            driver.step()
            if driver.seqs[bad].num_computed_tokens >= 64:
                device.fail_next("chunk", 1, INTERACTIVITY)
        driver.run()
    assert driver.replies[bad].token_ids == [] and "Impacting Interactivity" in str(driver.replies[bad].error)
    assert driver.replies[beside].token_ids == expected[0]


def test_a_fault_that_a_question_between_steps_meets_is_everyones_too(checkpoint: Callable[..., Path]) -> None:
    """To clear the cache may cut stored state, which is work on the device."""
    driver = Driver(checkpoint("qwen3"))
    expected = driver.generate([TALK], max_tokens=LENGTH)
    seq_id = driver.add(TALK, LENGTH)
    for _ in range(4):
        driver.step()
    assert driver.engine.num_rows == 1
    with pytest.raises(RuntimeError, match="Impacting"):
        driver.engine.ask(meets_a_fault)
    assert driver.engine.num_rows == 0
    driver.run()
    assert [driver.replies[seq_id].token_ids] == expected and driver.engine.report().lanes[0].num_restarts == 1


def meets_a_fault(engine: LLMEngine) -> None:
    raise RuntimeError(INTERACTIVITY)


@pytest.mark.parametrize("trims", [False, True])
def test_a_failed_copy_inside_the_cache_loses_no_token(checkpoint: Callable[..., Path], trims: bool) -> None:
    """Stored runs are split while results are taken in; the fault waits until these are delivered."""
    driver = Driver(checkpoint("qwen3"))
    prompts = [[*TALK, 1, *SHORT], [*TALK, 2, *LONG], SHORT]
    expected = [driver.generate([ids], max_tokens=20)[0] for ids in prompts]
    driver.engine.clear_cache()
    with failing_device(driver.engine.runner) as device:
        beside = driver.add(SHORT, 20)
        first = driver.add(prompts[0], 20)
        while driver.replies[first].finish_reason is None:
            driver.step()
        device.fail_next("split", 1, INTERACTIVITY)
        if trims:
            driver.engine.keep(driver.seqs[first], len(TALK))
        second = driver.add(prompts[1], 20)
        driver.run()
    assert device.num_failed == 1
    assert [driver.replies[seq_id].token_ids for seq_id in (first, second, beside)] == expected
    assert not any(reply.error for reply in driver.replies.values())
    assert [driver.generate([ids], max_tokens=20)[0] for ids in prompts] == expected
    assert driver.engine.cache_tree is not None
    check_integrity(driver.engine.cache_tree)


def test_features_of_a_failed_encoder_run_are_not_stored(checkpoint: Callable[..., Path]) -> None:
    model = VisionModel(checkpoint("vision:qwen3_5"))
    prompts = [model.prompt(["What is in this image? ", 1]), model.prompt([2, "Describe it."])]
    expected = model.driver().generate(prompts, max_tokens=LENGTH)
    driver = model.driver()
    with failing_device(driver.engine.runner) as device:
        device.fail_next("encode", 1, INTERACTIVITY)
        assert driver.generate(prompts, max_tokens=LENGTH) == expected
    assert device.num_failed == 1 and driver.engine.report().lanes[0].num_restarts
    assert driver.generate(prompts, max_tokens=LENGTH) == expected
