"""Guided rows keep to their grammar, whatever the model wants and whoever decodes beside them."""

import dataclasses
import re

import pytest

from tests.support.engine_driver import GREEDY, Driver, RandomPrompts, plain_loop
from tests.support.failing_device import failing_device
from tests.support.guiding import Guiding, is_person
from tests.support.rows import cases, row
from vllm_mlx.core.events import FinishReason
from vllm_mlx.core.request import Choice, Regex, TokenSampling
from vllm_mlx.runner.row_constraint import RowConstraint

from .faults import SHARED, faults

prompt = RandomPrompts(8)
HOT = TokenSampling(temperature=1.3, top_p=0.95, seed=5, repetition_penalty=1.1)


@pytest.fixture(scope="module", params=cases(["qwen3", "qwen3_5"], ["qwen3_5"]))
def path(request, checkpoint):
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def guiding(path):
    return Guiding(path)


def test_rows_beside_guided_ones_keep_their_tokens(driver, guiding, path) -> None:
    prompts = [prompt(length) for length in (5, 12, 20, 7)]
    rows = [driver.add(each, 25) for each in prompts]
    stop = guiding.tokenizer.eos_token_ids
    guided = []
    for number, length in enumerate((6, 15, 8, 11)):
        start = prompt(length)
        sampling = dataclasses.replace(HOT, seed=number) if number % 2 else GREEDY
        constraint = guiding.person(start, thinking="off")
        guided.append(driver.add(start, 150, sampling, constraint=constraint, stop_token_ids=stop))
    driver.run()
    for seq_id, each in zip(rows, prompts, strict=True):
        assert driver.replies[seq_id].token_ids == plain_loop(path, each, 25)[0]
    assert all(is_person(guiding.text(driver.replies[seq_id].token_ids)) for seq_id in guided)


@row("S2-13")
def test_a_row_beside_guided_ones_takes_no_more_steps_and_no_mask(driver, guiding, monkeypatch) -> None:
    masked: list[int] = []
    fill = RowConstraint.fill

    def counting(row: RowConstraint, mask: object) -> None:
        masked.append(1)
        fill(row, mask)

    monkeypatch.setattr(RowConstraint, "fill", counting)

    def num_steps(constraint_of) -> int:
        before = driver.engine.report().num_steps
        for length in (6, 9):
            start = prompt(length)
            driver.add(start, 40, constraint=constraint_of(start))
        mine = driver.add(prompt(8), 30)
        driver.step()
        while driver.replies[mine].finish_reason is None:
            driver.step()
        steps = driver.engine.report().num_steps - before
        driver.run()
        return steps

    unguided = num_steps(lambda start: None)
    assert not masked
    guided = num_steps(lambda start: guiding.constraint(start, Regex("[a-z]{500}"), thinking="off"))
    assert guided <= unguided
    assert len(masked) <= 2 * 40, "one for each token of the two guided rows"


@row("S2-11")
def test_a_guided_reply_is_the_same_alone_and_in_a_crowd(driver, guiding) -> None:
    start, stop = prompt(9), guiding.tokenizer.eos_token_ids
    fields = {"constraint": guiding.person(start, thinking="off"), "stop_token_ids": stop}
    alone = driver.generate([start], max_tokens=150, sampling=HOT, **fields)[0]
    row = driver.add(start, 150, HOT, **fields)
    for length in (4, 30, 12):
        driver.add(prompt(length), 20)
    driver.run()
    assert driver.replies[row].token_ids == alone


@pytest.mark.parametrize(
    ("sampling", "thinking"),
    [
        pytest.param(GREEDY, "off", id="greedy-off"),
        pytest.param(HOT, "on", id="hot-on", marks=pytest.mark.full),
        pytest.param(GREEDY, "on", id="greedy-on", marks=pytest.mark.full),
        pytest.param(HOT, "off", id="hot-off", marks=pytest.mark.full),
    ],
)
def test_a_guided_reply_is_the_same_with_drafts(checkpoint, sampling, thinking) -> None:
    path = checkpoint("qwen3")
    guiding, driver = Guiding(path), Driver(path, num_draft_tokens=0)
    start, stop = prompt(9), guiding.tokenizer.eos_token_ids
    fields = {"constraint": guiding.person(start, thinking=thinking), "stop_token_ids": stop}
    alone = driver.generate([start], max_tokens=150, sampling=sampling, **fields)[0]
    drafted = Driver(path, num_draft_tokens=5)
    wrong = [token if place % 7 else 499 for place, token in enumerate(alone, start=3)]
    rows = [drafted.add(start, 150, sampling, prediction=tuple(reply), **fields) for reply in ((), alone, wrong)]
    rows.append(drafted.add(prompt(12), 30))
    drafted.run()
    assert [drafted.replies[row].token_ids for row in rows[:3]] == [alone] * 3
    assert drafted.replies[rows[3]].token_ids == plain_loop(path, drafted.seqs[rows[3]].prompt.token_ids, 30)[0]
    accepted = drafted.engine.scheduler.speculation.num_accepted
    assert accepted["prediction"] > 0 and (accepted["grammar"] > 0 or thinking == "on")


@pytest.mark.parametrize(("sampling", "is_guided"), [(GREEDY, False), (HOT, True)], ids=["greedy-free", "hot-guided"])
def test_a_budget_that_is_spent_within_a_run_of_right_drafts(checkpoint, sampling, is_guided) -> None:
    """The prediction is the reply without a budget: right up to the end that is forced, whatever a run holds then."""
    path, budgets = checkpoint("qwen3"), (0, 1, 2, 3, 4, 5, 6, 10, 20)
    guiding = Guiding(path)
    start, end = (guiding.tokenizer.token_id(tag) for tag in ("<think>", "</think>"))
    sampling = dataclasses.replace(sampling, logit_bias=dict.fromkeys((start, end), -100.0))
    ids, plain, drafted = [*prompt(8), start], Driver(path, num_draft_tokens=0), Driver(path, num_draft_tokens=5)
    [free] = plain.generate([ids], max_tokens=30, sampling=sampling)
    found = []
    for driver, prediction in ((plain, ()), (drafted, tuple(free))):
        rows = []
        for budget in budgets:
            constrain = guiding.person if is_guided else guiding.constraint
            fields = {"constraint": constrain(ids, thinking_token_budget=budget), "prediction": prediction}
            rows.append(driver.add(ids, 30, sampling, stop_token_ids=guiding.tokenizer.eos_token_ids, **fields))
        driver.run()
        found.append([driver.replies[row].token_ids for row in rows])
    assert found[1] == found[0]
    assert all(reply[: budget + 1] == [*free[:budget], end] for budget, reply in zip(budgets, found[1], strict=True))
    assert drafted.engine.scheduler.speculation.num_accepted["prediction"] > 20


def test_the_end_of_a_grammar_comes_before_min_tokens(driver, guiding) -> None:
    start, stop = prompt(6), guiding.tokenizer.eos_token_ids
    constraint = guiding.constraint(start, Choice(("yes", "no")), thinking="off")
    row = driver.add(start, 30, HOT, constraint=constraint, stop_token_ids=stop, min_tokens=20)
    driver.run()
    assert driver.replies[row].finish_reason is FinishReason.STOP
    assert guiding.text(driver.replies[row].token_ids) in ("yes", "no")


def test_a_matcher_that_fails_ends_its_own_row(driver, guiding, path) -> None:
    start, other = prompt(6), prompt(8)
    constraint = guiding.constraint(start, Regex("[a-z]{500}"), thinking="off")
    broken = constraint.matcher.deep_copy()
    broken.consume_token(guiding.ids("9")[0])
    assert broken.is_error()
    row = driver.add(start, 30, constraint=dataclasses.replace(constraint, matcher=broken))
    beside = driver.add(other, 20)
    driver.run()
    assert "guided" in driver.replies[row].error.message
    assert driver.replies[beside].token_ids == plain_loop(path, other, 20)[0]


@pytest.mark.parametrize("seam", cases(SHARED, ["sampler"]))
def test_a_guided_row_goes_on_in_its_grammar_after_a_fault_in_its_batch(driver, guiding, seam) -> None:
    start, stop = prompt(9), guiding.tokenizer.eos_token_ids
    fields = {"constraint": guiding.person(start, thinking="off"), "stop_token_ids": stop}
    alone = driver.generate([start], max_tokens=150, sampling=HOT, **fields)[0]
    before = driver.engine.report().lanes[0].num_restarts
    with faults() as planned:
        rows = [driver.add(start, 150, HOT, **fields) for _ in range(2)]
        for _ in range(6):
            driver.step()
        planned.plan(seam)
        driver.run()
    assert driver.engine.report().lanes[0].num_restarts == before + 2
    assert [driver.replies[row].token_ids for row in rows] == [alone, alone]


def test_a_guided_row_goes_on_in_its_grammar_after_any_failed_submission(driver, guiding) -> None:
    """What a failed step seems to have sampled has been fed to the grammar by then."""
    start, stop = prompt(9), guiding.tokenizer.eos_token_ids
    fields = {"constraint": guiding.person(start, thinking="off"), "stop_token_ids": stop}
    alone = driver.generate([start], max_tokens=150, sampling=HOT, **fields)[0]
    for number in (3, 21, 39):
        with failing_device(driver.engine.runner) as device:
            device.fail([number])
            rows = [driver.add(start, 150, HOT, **fields) for _ in range(2)]
            driver.run()
        assert device.num_failed == 1
        assert [driver.replies[row].token_ids for row in rows] == [alone, alone]


@pytest.mark.parametrize("name", ["feed", "fill"])
def test_a_constraint_that_fails_ends_its_own_row(driver, guiding, path, monkeypatch, name) -> None:
    def failing(*args) -> None:
        raise RuntimeError("injected fault")

    start, other = prompt(6), prompt(8)
    row = driver.add(start, 30, constraint=guiding.constraint(start, Regex("[a-z]{500}"), thinking="off"))
    beside = driver.add(other, 20)
    for _ in range(6):
        driver.step()
    before = driver.engine.report().lanes[0].num_restarts
    monkeypatch.setattr(RowConstraint, name, failing)
    driver.run()
    assert "because of an error in the server" in driver.replies[row].error.message
    assert driver.replies[beside].token_ids == plain_loop(path, other, 20)[0]
    assert driver.engine.report().lanes[0].num_restarts == before


def test_a_preempted_row_goes_on_in_its_grammar(path, guiding) -> None:
    roomy = Driver(path)
    tight = Driver(path, rows_bytes=3 * roomy.engine.default.facts.footprint.bytes_at(270))
    stop = guiding.tokenizer.eos_token_ids
    starts = [prompt(150 + 20 * row) for row in range(4)]
    for one in (roomy, tight):
        for start in starts:
            constraint = guiding.constraint(start, Regex("([a-z]{6,9} ){1000}"), thinking="off")
            one.add(start, 120, GREEDY, constraint=constraint, stop_token_ids=stop)
        one.run()
    assert any(seq.num_preemptions for seq in tight.seqs.values())
    for seq_id in range(len(starts)):
        assert tight.replies[seq_id].token_ids == roomy.replies[seq_id].token_ids
        assert re.fullmatch("([a-z]{6,9} )*[a-z]{0,9}", guiding.text(tight.replies[seq_id].token_ids))


@row("S0-21")
def test_a_prompt_of_a_guided_reply_is_found_by_an_unguided_one(path, guiding) -> None:
    driver = Driver(path)
    start, stop = prompt(40), guiding.tokenizer.eos_token_ids
    driver.add(start, 20, constraint=guiding.person(start, thinking="off"), stop_token_ids=stop)
    driver.run()
    again = driver.add(start, 5)
    driver.run()
    assert driver.seqs[again].num_cached_tokens == 39
    assert driver.replies[again].token_ids == plain_loop(path, start, 5)[0]
