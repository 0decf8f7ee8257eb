"""A thought takes exactly its budget of tokens, then its end is written, then the grammar begins."""

import dataclasses
import itertools
import random
import re

import pytest

from tests.support.engine_driver import GREEDY, Driver, plain_loop
from tests.support.guiding import Guiding, is_person
from tests.support.rows import cases, row
from vllm_mlx.core.config import ReasoningStrings
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.request import Choice, Regex, TokenSampling

HOT = TokenSampling(temperature=1.2, seed=11)
BUDGETS = (0, 1, 5, 20, -1, None)


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(500) for _ in range(length)]


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def guiding(path):
    return Guiding(path)


@pytest.fixture(scope="module")
def marks(guiding) -> tuple[int, int]:
    start, end = (guiding.tokenizer.token_id(tag) for tag in ("<think>", "</think>"))
    return start, end


def banned(*ids: int) -> dict[int, float]:
    return dict.fromkeys(ids, -100.0)


@row("S2-11", "S3-2", "S3-4", "S3-9")
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_budgets_of_all_kinds_in_one_batch(driver, guiding, marks, path, sampling) -> None:
    """No row would end its thought by itself."""
    start, end = marks
    sampling = dataclasses.replace(sampling, logit_bias=banned(start, end))
    rows = {}
    for budget in BUDGETS:
        ids = [*prompt(8), start]
        constraint = guiding.constraint(ids, thinking_token_budget=budget)
        rows[driver.add(ids, 40, sampling, constraint=constraint)] = budget
    plain = prompt(9)
    unbudgeted = driver.add(plain, 40)
    driver.run()
    for seq_id, budget in rows.items():
        tokens = driver.replies[seq_id].token_ids
        if budget in (None, -1):
            assert end not in tokens
        else:
            assert tokens.index(end) == budget
            assert tokens.count(end) == 1
    assert driver.replies[unbudgeted].token_ids == plain_loop(path, plain, 40)[0]


@row("S3-10")
def test_rows_join_and_leave_while_others_think(driver, guiding, marks) -> None:
    start, end = marks
    sampling = dataclasses.replace(HOT, logit_bias=banned(start, end))
    rows = {}
    for number in range(14):
        ids = [*prompt(5 + number), start]
        budget = number * 3 % 17
        constraint = guiding.constraint(ids, thinking_token_budget=budget)
        rows[driver.add(ids, 24, dataclasses.replace(sampling, seed=number), constraint=constraint)] = budget
        driver.add(prompt(4), max_tokens=number % 5 + 1)
        for _ in range(number % 4):
            driver.step()
    driver.run()
    for seq_id, budget in rows.items():
        assert driver.replies[seq_id].token_ids.index(end) == budget


@row("S3-12")
@pytest.mark.parametrize("budget", cases([0, 1, 5, 20], [0, 5]))
def test_a_grammar_follows_a_spent_budget(driver, guiding, marks, budget) -> None:
    start, end = marks
    ids, stop = [*prompt(8), start], guiding.tokenizer.eos_token_ids
    sampling = dataclasses.replace(HOT, logit_bias=banned(end))
    constraint = guiding.person(ids, thinking_token_budget=budget)
    row = driver.add(ids, 200, sampling, constraint=constraint, stop_token_ids=stop)
    driver.run()
    tokens = driver.replies[row].token_ids
    assert tokens.index(end) == budget
    assert is_person(guiding.text(tokens[budget + 1 :]))


@row("S2-7")
def test_no_grammar_bounds_a_thought_that_ends_by_itself(driver, guiding, marks) -> None:
    start, end = marks
    ids, stop = [*prompt(8), start], guiding.tokenizer.eos_token_ids
    sampling = dataclasses.replace(HOT, logit_bias={end: 5.0})
    free = driver.generate([ids], max_tokens=60, sampling=sampling)[0]
    row = driver.add(ids, 200, sampling, constraint=guiding.person(ids), stop_token_ids=stop)
    driver.run()
    tokens = driver.replies[row].token_ids
    thought = tokens.index(end) + 1
    assert 1 < thought < 60
    assert tokens[:thought] == free[:thought]
    assert is_person(guiding.text(tokens[thought:]))


def test_a_reply_may_open_its_thought_itself_and_only_at_its_start(driver, guiding, marks) -> None:
    start, end = marks
    ids, stop = prompt(8), guiding.tokenizer.eos_token_ids
    eager = dataclasses.replace(HOT, logit_bias={start: 100.0, end: -100.0})
    shy = dataclasses.replace(HOT, logit_bias=banned(start))
    for sampling, thinks in ((eager, True), (shy, False)):
        constraint = guiding.person(ids, thinking_token_budget=3)
        row = driver.add(ids, 200, sampling, constraint=constraint, stop_token_ids=stop)
        driver.run()
        tokens = driver.replies[row].token_ids
        if thinks:
            assert tokens[0] == start and tokens.index(end) == 4
        answer = tokens[5 if thinks else 0 :]
        assert start not in answer
        assert is_person(guiding.text(answer))


@row("S3-6")
def test_thoughts_of_earlier_turns_do_not_count(driver, guiding, marks) -> None:
    start, end = marks
    turn = guiding.ids("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    open_before = [start, *prompt(4), *turn]
    closed_before = [start, *prompt(4), end, *turn]
    closed_now = [*turn, start, *guiding.ids("\n\n"), end, *guiding.ids("\n\n")]
    stop = guiding.tokenizer.eos_token_ids
    for ids in (open_before, closed_before, closed_now):
        constraint = guiding.constraint(ids, Choice(("yes", "no")))
        sampling = dataclasses.replace(HOT, logit_bias=banned(start))
        row = driver.add(ids, 30, sampling, constraint=constraint, stop_token_ids=stop)
        driver.run()
        assert guiding.text(driver.replies[row].token_ids) in ("yes", "no")


@row("S3-6")
def test_what_the_prompt_holds_of_a_thought_is_charged_but_for_its_layout(driver, guiding, marks) -> None:
    start, end = marks
    sampling = dataclasses.replace(HOT, logit_bias=banned(start, end))
    begun = guiding.ids("The quick")
    for behind, expected in ((guiding.ids("\n"), 6), ([*guiding.ids("\n"), *begun], 6 - len(begun)), (begun * 9, 0)):
        ids = [*prompt(4), start, *behind]
        row = driver.add(ids, 30, sampling, constraint=guiding.constraint(ids, thinking_token_budget=6))
        driver.run()
        assert driver.replies[row].token_ids.index(end) == expected


@row("S3-8")
def test_a_second_thought_has_the_budget_anew(driver, guiding, marks) -> None:
    start, end = marks
    ids = [*prompt(4), start]
    sampling = dataclasses.replace(HOT, logit_bias={start: 6.0, end: -100.0})
    row = driver.add(ids, 80, sampling, constraint=guiding.constraint(ids, thinking_token_budget=4))
    driver.run()
    tokens = driver.replies[row].token_ids
    ends = [at for at, token in enumerate(tokens) if token == end]
    assert len(ends) > 2
    for before, at in itertools.pairwise(ends):
        opened = tokens.index(start, before)
        assert at - opened - 1 == 4


@row("S3-7", "S3-16")
def test_an_end_of_several_tokens_with_a_phrase(path, driver, marks) -> None:
    start, end = marks
    phrase = "\n\nThat is enough.\n</think>\n\n"
    guiding = Guiding(path, strings=ReasoningStrings("<think>", phrase))
    forced = guiding.ids(phrase)
    sampling = dataclasses.replace(HOT, logit_bias=banned(start, end, *guiding.ids("\n\n")))
    stop = guiding.tokenizer.eos_token_ids
    for budget in (0, 1, 5):
        ids = [*prompt(6), start]
        constraint = guiding.constraint(ids, Choice(("yes", "no")), thinking_token_budget=budget)
        row = driver.add(ids, 80, sampling, constraint=constraint, stop_token_ids=stop)
        driver.run()
        tokens = driver.replies[row].token_ids
        assert tokens[budget : budget + len(forced)] == forced
        assert guiding.text(tokens[budget + len(forced) :]).strip() in ("yes", "no")


@row("S3-8")
def test_an_end_that_is_begun_is_gone_on_with(path, driver, marks) -> None:
    start, _end = marks
    guiding = Guiding(path, strings=ReasoningStrings("<think>", "quick brown</think>"))
    forced = guiding.ids("quick brown</think>")
    assert len(forced) > 2
    ids = [*prompt(6), start, *guiding.ids("hello"), forced[0]]
    budget = len(ids) - 7
    row = driver.add(ids, 10, constraint=guiding.constraint(ids, thinking_token_budget=budget))
    driver.run()
    assert driver.replies[row].token_ids[: len(forced) - 1] == forced[1:]


@row("S2-10")
def test_tags_that_are_plain_text(path, driver) -> None:
    guiding = Guiding(path, reasoning="granite")
    opened = [*prompt(5), *guiding.ids("Here is my thought process:")]
    stop = guiding.tokenizer.eos_token_ids
    constraint = guiding.constraint(opened, Regex("[0-9]{4}"), thinking_token_budget=7)
    row = driver.add(opened, 80, HOT, constraint=constraint, stop_token_ids=stop)
    driver.run()
    text = guiding.text(driver.replies[row].token_ids)
    assert re.fullmatch(r"(?s).*Here is my response:\n{0,2}[0-9]{4}", text)


@row("S3-13")
def test_max_tokens_below_the_budget_ends_first(driver, guiding, marks) -> None:
    start, end = marks
    ids = [*prompt(8), start]
    sampling = dataclasses.replace(HOT, logit_bias=banned(end))
    row = driver.add(ids, 6, sampling, constraint=guiding.constraint(ids, thinking_token_budget=20))
    driver.run()
    assert len(driver.replies[row].token_ids) == 6
    assert end not in driver.replies[row].token_ids


@row("S3-5")
def test_a_budget_without_known_tags_is_refused(path) -> None:
    guiding = Guiding(path, reasoning=None)
    with pytest.raises(InvalidParameter, match="reasoning_config is not configured"):
        guiding.constraint([1, 2], thinking_token_budget=3)
    assert guiding.constraint([1, 2], thinking_token_budget=-1) is None


@row("S3-11")
def test_budgets_hold_across_a_preemption(path, guiding, marks) -> None:
    start, end = marks
    roomy = Driver(path)
    tight = Driver(path, rows_bytes=3 * roomy.engine.default.facts.footprint.bytes_at(350))
    sampling = dataclasses.replace(HOT, logit_bias=banned(start, end))
    budgets = (150, 130, 170, 160)
    for seq_id, budget in enumerate(budgets):
        ids = [*prompt(150 + 20 * seq_id), start]
        tight.add(ids, 200, sampling, constraint=guiding.constraint(ids, thinking_token_budget=budget))
    tight.run()
    assert any(seq.num_preemptions for seq in tight.seqs.values())
    for seq_id, budget in enumerate(budgets):
        assert tight.replies[seq_id].token_ids.index(end) == budget


@row("S3-11")
def test_budgets_hold_behind_a_cached_prefix(driver, guiding, marks) -> None:
    start, end = marks
    ids = [*prompt(90), start]
    sampling = dataclasses.replace(HOT, logit_bias=banned(start, end))
    rows = []
    for _ in range(2):
        constraint = guiding.constraint(ids, Choice(("yes", "no")), thinking_token_budget=7)
        stop = guiding.tokenizer.eos_token_ids
        rows.append(driver.add(ids, 40, sampling, constraint=constraint, stop_token_ids=stop))
        driver.run()
    assert driver.seqs[rows[1]].num_cached_tokens > 0
    assert driver.replies[rows[0]].token_ids == driver.replies[rows[1]].token_ids
    assert driver.replies[rows[1]].token_ids.index(end) == 7
