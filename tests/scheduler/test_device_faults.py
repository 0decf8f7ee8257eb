"""After a fault of the device all rows begin again, and only a row that makes no progress ends."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.core.errors import GenerationError
from vllm_mlx.core.sequence import Sequence
from vllm_mlx.core.step import PrefillChunk, SequenceUpdate, StepOutput
from vllm_mlx.util.faults import Fault

from .fake_runner import FakeRunner, reply
from .test_scheduler import Bench, passes_of

FAILED = GenerationError("the device failed")


def fail(bench: Bench, fault: Fault, num_tokens: int = 0) -> list[SequenceUpdate]:
    """A step is planned, and nothing of it happens."""
    bench.scheduler.schedule(bench.now)
    bench.runner = FakeRunner()
    updates = bench.scheduler.recover(FAILED, fault, num_tokens)
    for update in updates:
        bench.updates[update.seq_id].append(update)
    return updates


def is_right(bench: Bench, seq: Sequence) -> bool:
    return bench.tokens(seq) == reply(seq.prompt.token_ids, seq.max_tokens, frozenset())


def test_rows_share_a_batch_again_unless_memory_was_short() -> None:
    for fault, num_passes in ((Fault.FAILED, {1}), (Fault.OUT_OF_MEMORY, {2})):
        bench = Bench()
        rows = [bench.add(5, 12), bench.add(5, 12)]
        bench.step()
        fail(bench, fault)
        bench.plans.clear()
        bench.run()
        assert {len(passes_of(plan)) for plan in bench.plans if sum(map(len, plan.decode)) == 2} == num_passes
        assert all(is_right(bench, seq) for seq in rows)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(list(Fault))), max_size=8))
def test_replies_are_exact_whenever_the_device_fails(faults: list[tuple[int, Fault]]) -> None:
    bench = Bench()
    rows = [bench.add(3 + 400 * number, 8) for number in range(4)]
    for num_steps, fault in faults:
        for _ in range(num_steps):
            bench.step()
        if bench.scheduler.has_work:
            fail(bench, fault, num_tokens=100)
    bench.run()
    for seq in rows:
        ended = bench.updates[seq.seq_id][-1].error is not None
        assert seq.num_faults >= 3 if ended else is_right(bench, seq)


def test_a_lack_of_memory_shrinks_the_pool_and_any_fault_shortens_chunks() -> None:
    for fault in Fault:
        bench = Bench(rows_bytes=10_000)
        bench.add(2000, 12)
        bench.step()
        before = bench.scheduler.pool.num_bytes
        fail(bench, fault, num_tokens=2000)
        assert bench.scheduler.pool.num_shortened == 1
        assert (bench.scheduler.pool.num_bytes < before) == (fault is Fault.OUT_OF_MEMORY)
        bench.plans.clear()
        bench.run()
        assert max(chunk.end - chunk.start for plan in bench.plans for chunk in plan.prefill) <= 1000


class Small(FakeRunner):
    """A device that has memory for chunks of so many tokens."""

    def __init__(self, num_tokens: int):
        super().__init__()
        self._num_tokens = num_tokens

    def prefill(self, chunks: tuple[PrefillChunk, ...]) -> StepOutput:
        fitting = tuple(chunk for chunk in chunks if chunk.end - chunk.start <= self._num_tokens)
        refused = tuple((chunk.seq.seq_id, chunk.end - chunk.start) for chunk in chunks if chunk not in fitting)
        for seq_id, _ in refused:
            self._drop(seq_id)
        return replace(super().prefill(fitting), refused=refused)
