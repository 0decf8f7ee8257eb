"""Several tenants on one scheduler: none waits for long behind another, and with one of them arrival decides."""

from collections.abc import Sequence as Rows
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drawing import examples
from vllm_mlx.core.sequence import Sequence, SequenceStatus
from vllm_mlx.core.step import StepPlan

from .fake_runner import reply
from .test_scheduler import Bench


class Tenants(Bench):
    """A bench whose sequences belong to tenants."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.started: list[Sequence] = []  # in order of their first place

    def step(self) -> None:
        super().step()
        self.started += [seq for seq in self.seqs.values() if seq.scheduled_s is not None and seq not in self.started]

    def steps_until_first_token(self, seq: Sequence) -> int:
        for num_steps in range(10_000):
            if seq.num_output_tokens:
                return num_steps
            self.step()
        raise AssertionError("it never comes")

    def is_running(self, seq: Sequence) -> bool:
        return seq.status in (SequenceStatus.PREFILLING, SequenceStatus.DECODING)

    def check_replies(self) -> None:
        for seq in self.seqs.values():
            assert self.tokens(seq) == reply(seq.prompt.token_ids, seq.max_tokens, frozenset())


def run_alone(num_prompt: int) -> int:
    bench = Tenants()
    return bench.steps_until_first_token(bench.ask("ben", num_prompt))


@pytest.mark.parametrize("num_prompt", [10, 150])
def test_a_chat_beside_a_tenant_that_fills_every_place_starts_within_twice_its_time(num_prompt: int) -> None:
    bench = Tenants(max_num_seqs=8)
    for _ in range(40):
        bench.ask("ann", 30, 400)
    for _ in range(20):
        bench.step()
    assert bench.steps_until_first_token(bench.ask("ben", num_prompt)) <= 2 * run_alone(num_prompt) + 2


def test_a_chat_beside_long_prompts_of_another_tenant_starts_within_twice_its_time() -> None:
    bench = Tenants(max_num_seqs=8)
    for _ in range(10):
        bench.ask("ann", 20_000, 4)
    for _ in range(5):
        bench.step()
    for num_prompt in (2000, 2000, 2000):
        num_before = len(bench.plans)
        chat = bench.ask("ben", num_prompt)
        bench.steps_until_first_token(chat)
        during = bench.plans[num_before:]
        assert engine_s(during, of="ann") <= engine_s(during, of="ben") + 3 * 0.2, "each chunk takes up to 0.2 s"
        while chat.finish_reason is None:
            bench.step()


def test_a_chat_beside_a_tenant_that_fills_the_memory_starts_at_once() -> None:
    bench = Tenants(rows_bytes=1800)
    for _ in range(8):
        bench.ask("ann", 200, 180)
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert bench.scheduler.pool.is_crowded
    chat = bench.ask("ben", 100, 20)
    assert bench.steps_until_first_token(chat) <= 2 * run_alone(100) + 2
    bench.run()
    assert chat.num_preemptions == 0
    bench.check_replies()


def test_preempted_rows_of_another_tenant_give_the_same_replies() -> None:
    bench = Tenants(max_num_seqs=4)
    for _ in range(6):
        bench.ask("ann", 40, 60)
    for number in range(5):
        for _ in range(10):
            bench.step()
        bench.ask("ben", 10 + number, 12)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    bench.check_replies()


def test_a_tenant_takes_no_more_than_an_even_share_of_places_from_another() -> None:
    bench = Tenants(max_num_seqs=8)
    for _ in range(20):
        bench.ask("ann", 10, 60)
    for _ in range(5):
        bench.step()
    theirs = [bench.ask("ben", 10, 60) for _ in range(20)]
    bench.step()
    assert sum(map(bench.is_running, theirs)) == 4
    bench.run()
    bench.check_replies()


def test_tenants_take_turns_at_places_that_come_free() -> None:
    bench = Tenants(max_num_seqs=1)
    asked = [bench.ask("ann", 300), bench.ask("ann", 300), bench.ask("ann", 300), *(bench.ask("ben", 30) for _ in "xy")]
    ended: list[int] = []
    while bench.scheduler.has_work:
        bench.step()
        ended += [seq.seq_id for seq in asked if seq.finish_reason is not None and seq.seq_id not in ended]
    assert ended == [0, 3, 1, 4, 2]


def test_tenants_take_turns_in_prefill() -> None:
    bench = Tenants(max_num_seqs=8)
    for tenant in ("ann", "ann", "ben", "cat"):
        bench.ask(tenant, 30_000)
    for _ in range(100):
        bench.step()
    heads = [plan.prefill[0].seq.tenant for plan in bench.plans]
    assert heads == (["ann", "ben", "cat"] * 34)[:100]
    seconds = [engine_s(bench.plans, of=tenant) for tenant in ("ann", "ben", "cat")]
    assert max(seconds) - min(seconds) <= 0.2, "within one chunk of each"


def engine_s(plans: Rows[StepPlan], *, of: str) -> float:
    """Seconds of the fake device: each token takes one millisecond, decoded or prefilled."""
    rows = [row for plan in plans for group in plan.decode for row in group]
    chunks = [chunk for plan in plans for chunk in plan.prefill]
    tokens = sum(row.tenant == of for row in rows)
    return (tokens + sum(chunk.end - chunk.start for chunk in chunks if chunk.seq.tenant == of)) / 1000


def longest_chunk(plans: Rows[StepPlan]) -> int:
    return max(chunk.end - chunk.start for plan in plans for chunk in plan.prefill)


def test_no_row_gives_up_its_place_for_a_prompt_that_would_not_fit_then_either() -> None:
    bench = Tenants(max_num_seqs=4, rows_bytes=2000)
    theirs = [bench.ask("ann", 80, 20) for _ in range(4)]
    bench.step()
    chat = bench.ask("ben", 1500, 100)
    while chat.scheduled_s is None:
        bench.step()
    assert bench.scheduler.num_preemptions == 0 and all(seq.finish_reason is not None for seq in theirs)
    bench.run()
    bench.check_replies()


def test_chunks_are_short_while_another_tenant_was_here_recently() -> None:
    bench = Tenants(max_num_seqs=8)
    bench.ask("ann", 100_000, 4)
    for _ in range(3):
        bench.step()
    assert longest_chunk(bench.plans) == 1024, "alone, a step may take three seconds, to try a longer chunk"
    chat = bench.ask("ben", 100)
    while chat.finish_reason is None:
        bench.step()
    num_before = len(bench.plans)
    for _ in range(20):
        bench.step()
    assert longest_chunk(bench.plans[num_before:]) == 64
    bench.now = 100.0
    for _ in range(3):
        bench.step()
    assert longest_chunk(bench.plans[-2:]) >= 512, "the other was away for more than a minute"


loads = st.lists(
    st.tuples(
        st.sampled_from(["ann", "ann", "ben"]),
        st.integers(1, 900),  # prompt
        st.integers(1, 30),  # max_tokens
        st.integers(0, 6),  # steps before the next arrival
    ),
    max_size=16,
)


@settings(max_examples=examples(20), deadline=None)
@given(loads, st.integers(1, 4), st.sampled_from([1500, 4000, 1 << 30]))
def test_all_are_served_exactly_and_each_tenant_in_order_of_arrival(
    load: Rows[tuple[str, int, int, int]], max_num_seqs: int, rows_bytes: int
) -> None:
    bench = Tenants(max_num_seqs=max_num_seqs, rows_bytes=rows_bytes)
    for tenant, num_prompt, max_tokens, num_steps in load:
        bench.ask(tenant, num_prompt, max_tokens)
        for _ in range(num_steps):
            bench.step()
            assert bench.scheduler.num_running <= max_num_seqs
    bench.run()
    bench.check_replies()
    for tenant in ("ann", "ben"):
        first_steps = [seq.seq_id for seq in bench.started if seq.tenant == tenant]
        assert first_steps == sorted(first_steps)
    assert bench.runner.held == {}


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 300), st.integers(0, 10)), max_size=20), st.integers(2, 6)
)
def test_a_tenant_that_has_nothing_running_is_admitted_within_a_few_steps(
    load: Rows[tuple[int, int, int]], max_num_seqs: int
) -> None:
    bench = Tenants(max_num_seqs=max_num_seqs)
    for num_prompt, max_tokens, num_steps in load:
        bench.ask("ann", num_prompt, max_tokens)
        for _ in range(num_steps):
            bench.step()
    chat = bench.ask("ben", 20)
    for _ in range(2):
        bench.step()
    assert chat.scheduled_s is not None
    assert bench.steps_until_first_token(chat) <= 6


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 40), st.integers(0, 4)), max_size=8))
def test_one_tenant_is_served_as_without_tenants(load: Rows[tuple[int, int, int]]) -> None:
    plans = []
    for tenant in ("", "ann"):
        bench = Tenants(max_num_seqs=3, rows_bytes=4000)
        for num_prompt, max_tokens, num_steps in load:
            bench.ask(tenant, num_prompt, max_tokens)
            for _ in range(num_steps):
                bench.step()
        bench.run()
        plans.append([([seq.seq_id for group in p.decode for seq in group], p.release) for p in bench.plans])
    assert plans[0] == plans[1]
