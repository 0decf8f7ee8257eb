"""The scheduler against a fake device: exact replies under any arrivals, aborts and memory, in order, within limits."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drawing import examples
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import GenerationError
from vllm_mlx.core.events import FinishReason
from vllm_mlx.core.memory import MemoryBudget, RowFootprint
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.core.step import SequenceUpdate, StepOutput, forward_passes
from vllm_mlx.scheduler.prefill_pacer import PrefillPacer
from vllm_mlx.scheduler.scheduler import Scheduler

from .fake_runner import SCORE_S, FakeRunner, reply

FOOTPRINT = RowFootprint(bytes_per_token=1)


class Bench:
    def __init__(
        self, *, rows_bytes: int = 1 << 30, can_batch: bool = True, pacer: PrefillPacer | None = None, **config
    ):
        self.config = EngineConfig(model="fake", **config)
        self.memory = MemoryBudget(total_bytes=rows_bytes + 2, weights_bytes=1, transient_bytes=1)
        self.pacer = pacer or PrefillPacer(max_stall_s=0.2, max_chunk=2048, tokens_per_s=1000, overhead_s=0.001)
        self.scheduler = Scheduler(
            self.config, memory=self.memory, footprint=FOOTPRINT, pacer=self.pacer, can_batch=can_batch
        )
        self.runner = FakeRunner()
        self.updates: dict[int, list[SequenceUpdate]] = {}
        self.seqs: dict[int, Sequence] = {}
        self.plans = []
        self.now = 0.0

    def add(self, num_prompt: int, max_tokens: int = 5, stops: frozenset[int] = frozenset()) -> Sequence:
        return self.ask("", num_prompt, max_tokens, stops)

    def ask(self, tenant: str, num_prompt: int, max_tokens: int = 5, stops: frozenset[int] = frozenset()) -> Sequence:
        seq_id = len(self.seqs)
        prompt = PromptInputs(token_ids=tuple((seq_id * 13 + i) % 50 for i in range(num_prompt)))
        seq = Sequence(
            seq_id=seq_id, prompt=prompt, sampling=None, max_tokens=max_tokens, stop_token_ids=stops, tenant=tenant
        )
        self.seqs[seq_id] = seq
        self.updates[seq_id] = []
        self.scheduler.add(seq)
        return seq

    def step(self) -> None:
        plan = self.scheduler.schedule(self.now)
        self.plans.append(plan)
        self._collect(self.scheduler.update(self.runner.decode(plan)))
        if plan.prefill:
            self._collect(self.scheduler.update(self.runner.prefill(plan.prefill)))

    def run(self) -> None:
        for _ in range(100_000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler never comes to rest")

    def tokens(self, seq: Sequence) -> list[int]:
        return [token.token_id for update in self.updates[seq.seq_id] for token in update.tokens]

    def _collect(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            self.updates[update.seq_id].append(update)


requests = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 700), st.integers(1200, 1600)),  # prompt: the long ones decode apart
        st.integers(1, 40),  # max_tokens
        st.frozensets(st.integers(0, 49), max_size=2),  # stop ids
        st.integers(0, 4),  # steps before the next arrival
        st.booleans(),  # aborted at once after those steps
        st.booleans(),  # whether the next batch fails
    ),
    max_size=8,
)


@settings(max_examples=examples(50), deadline=None)
@given(requests, st.integers(1, 4), st.sampled_from([1500, 2500, 4000, 1 << 30]), st.booleans())
def test_every_reply_is_exact_under_any_load(load, max_num_seqs, rows_bytes, can_batch):
    bench = Bench(max_num_seqs=max_num_seqs, rows_bytes=rows_bytes, can_batch=can_batch)
    aborted = set()
    for num_prompt, max_tokens, stops, num_steps, abort, breaks in load:
        seq = bench.add(num_prompt, max_tokens, stops)
        bench.runner.breaks |= breaks
        for _ in range(num_steps):
            bench.step()
            assert bench.scheduler.num_running <= max_num_seqs
        if abort and bench.scheduler.abort(seq.seq_id):
            aborted.add(seq.seq_id)
    bench.run()
    for seq in bench.seqs.values():
        expected = reply(seq.prompt.token_ids, seq.max_tokens, seq.stop_token_ids)
        if seq.seq_id in aborted:
            assert bench.tokens(seq) == expected[: len(bench.tokens(seq))]
            continue
        assert bench.tokens(seq) == expected
        stopped = expected[-1] in seq.stop_token_ids
        assert seq.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert [u.finish_reason for u in bench.updates[seq.seq_id]].count(None) == len(bench.updates[seq.seq_id]) - 1
    assert bench.runner.held == {}, "a finished row's state is dropped"


def test_rows_never_take_more_than_their_budget_while_more_than_one_runs():
    bench = Bench(rows_bytes=6000)
    for _ in range(6):
        bench.add(1000, max_tokens=300)
    while bench.scheduler.has_work:
        bench.step()
        if bench.scheduler.num_running > 1:
            assert bench.scheduler.room.rows_bytes() <= 6000
    assert bench.scheduler.num_preemptions > 0
    for seq in bench.seqs.values():
        assert bench.tokens(seq) == reply(seq.prompt.token_ids, seq.max_tokens, frozenset())


def test_a_row_that_is_preempted_alone_in_its_group_takes_the_group_along():
    bench = Bench(rows_bytes=3400)
    long, short = bench.add(2000, max_tokens=600), bench.add(100, max_tokens=600)
    bench.run()
    assert any(len(plan.decode) == 2 for plan in bench.plans), "the two decode apart"
    assert short.num_preemptions > 0
    for seq in (long, short):
        assert bench.tokens(seq) == reply(seq.prompt.token_ids, seq.max_tokens, frozenset())


def test_the_youngest_row_is_preempted_and_returns_first():
    bench = Bench(rows_bytes=2400)
    first, second = bench.add(500, max_tokens=700), bench.add(500, max_tokens=700)
    bench.run()
    assert first.num_preemptions == 0
    assert second.num_preemptions > 0


def test_requests_are_admitted_in_order_of_arrival():
    bench = Bench(max_num_seqs=1)
    for num_prompt in (600, 3, 5):
        bench.add(num_prompt)
    bench.run()
    finished = [seq_id for plan in bench.plans for seq_id in plan.release]
    assert finished == [0, 1, 2]


def test_short_prompts_share_a_step():
    bench = Bench()
    for _ in range(4):
        bench.add(12)
    bench.step()
    assert [chunk.end for chunk in bench.plans[0].prefill] == [11] * 4


def test_a_short_prompt_does_not_wait_for_a_long_one():
    bench = Bench()
    long, short = bench.add(20_000), bench.add(20)
    bench.step()
    bench.step()
    assert short.num_output_tokens + short.num_in_flight == 1
    assert long.num_computed_tokens < 5_000


def test_prefill_beside_running_replies_keeps_to_the_stall_budget():
    bench = Bench()
    bench.add(10, max_tokens=500)
    for _ in range(5):
        bench.step()
    bench.add(20_000)
    for _ in range(20):
        bench.step()
        spent_s = sum((chunk.end - chunk.start) * 0.001 for chunk in bench.plans[-1].prefill)
        assert 0 < spent_s <= 0.2


def test_log_probabilities_of_a_prompt_are_part_of_the_stall_budget():
    bench = Bench()
    bench.add(10, max_tokens=500)
    for _ in range(5):
        bench.step()
    bench.add(900).scores_prompt = True
    bench.step()  # from its chunk the pacer learns what they take
    while not bench.seqs[1].is_scored:
        bench.step()
        spent_s = sum((chunk.end - chunk.start) * (0.001 + SCORE_S) for chunk in bench.plans[-1].prefill)
        assert spent_s <= 0.2
    assert len(bench.seqs[1].prompt_logprobs) >= 899


def test_nothing_is_launched_past_max_tokens():
    bench = Bench()
    seq = bench.add(1, max_tokens=3)
    bench.run()
    assert sum(len(group) for plan in bench.plans for group in plan.decode) == 3
    assert seq.num_output_tokens == 3


def test_a_failed_row_ends_alone():
    bench = Bench()
    bad, good = bench.add(5), bench.add(5)
    bench.step()
    error = GenerationError("broken")
    updates = bench.scheduler.update(StepOutput(failed=((bad.seq_id, error),)))
    assert [(update.seq_id, update.error) for update in updates] == [(bad.seq_id, error)]
    bench.run()
    assert bench.tokens(good) == reply(good.prompt.token_ids, 5, frozenset())
    assert bench.tokens(bad) == []


def passes_of(plan):
    """The rows of each forward pass of a plan."""
    passes = forward_passes(plan.decode, plan.isolated)
    return [frozenset(seq.seq_id for group in groups for seq in group) for groups in passes]


def test_rows_that_shared_a_fault_decode_alone_to_their_end_and_others_still_together():
    bench = Bench()
    early = [bench.add(5, 12), bench.add(5, 12)]
    bench.step()
    bench.runner.breaks = True
    bench.step()
    bench.plans.clear()
    late = [bench.add(5, 12), bench.add(5, 12)]
    bench.run()
    assert bench.scheduler.num_restarts == 2 and bench.scheduler.num_preemptions == 0
    passes = {rows for plan in bench.plans for rows in passes_of(plan)}
    assert {rows for rows in passes if len(rows) > 1} == {frozenset(seq.seq_id for seq in late)}
    assert {frozenset({seq.seq_id}) for seq in early} <= passes
    for seq in (*early, *late):
        assert bench.tokens(seq) == reply(seq.prompt.token_ids, 12, frozenset())


def test_after_steps_that_failed_as_a_whole_rows_begin_again_once_each_and_who_waits_goes_on_waiting():
    bench = Bench(max_num_seqs=2)
    older, younger, waiting = bench.add(5), bench.add(5), bench.add(5)
    error = GenerationError("broken")
    for ended in ([], [younger], [older]):
        bench.step()
        bench.runner = FakeRunner()
        if ended == [older]:
            bench.scheduler.abort(waiting.seq_id)
            waiting = bench.add(5)
        updates = bench.scheduler.recover(error)
        assert [(update.seq_id, update.error) for update in updates] == [(seq.seq_id, error) for seq in ended]
    bench.run()
    assert bench.tokens(waiting) == reply(waiting.prompt.token_ids, 5, frozenset())


def test_rows_that_begin_again_do_not_wait_for_another_to_end(monkeypatch):
    """A row that was preempted does; but here places came free."""
    monkeypatch.setattr("vllm_mlx.scheduler.memory_pool.RESERVED_OUTPUT", 0)
    bench = Bench(rows_bytes=3500)
    long, short = bench.add(1400, 1000), [bench.add(300, 400) for _ in range(3)]
    while not bench.scheduler.num_preemptions:
        bench.step()
    bench.step()
    bench.runner.breaks = True
    bench.step()
    assert bench.scheduler.num_restarts and bench.scheduler.num_running == 0
    bench.step()
    assert bench.scheduler.num_running > 1
    bench.run()
    for seq in (long, *short):
        assert bench.tokens(seq) == reply(seq.prompt.token_ids, seq.max_tokens, frozenset())


def test_where_no_row_ran_a_step_that_fails_ends_who_waits():
    bench = Bench()
    seq = bench.add(5)
    assert [update.seq_id for update in bench.scheduler.recover(GenerationError("broken"))] == [seq.seq_id]
    assert not bench.scheduler.has_work


def test_abort_forgets_a_sequence_wherever_it_is():
    bench = Bench(max_num_seqs=1)
    running, waiting = bench.add(5), bench.add(5)
    bench.step()
    assert bench.scheduler.abort(waiting.seq_id)
    assert bench.scheduler.abort(running.seq_id)
    assert not bench.scheduler.abort(running.seq_id)
    bench.run()
    assert bench.runner.held == {}
