"""What is measured against what was reckoned: a device that takes more than the budget says."""

from itertools import pairwise

import pytest

from vllm_mlx.core.memory import MemoryBudget, Overrun, Pressure
from vllm_mlx.core.sequence import Sequence
from vllm_mlx.core.step import ChunkTiming, StepOutput, StepPlan
from vllm_mlx.scheduler.memory_pool import MemoryPool
from vllm_mlx.scheduler.prefill_pacer import PrefillPacer

from .fake_runner import FakeRunner, reply
from .test_scheduler import Bench


class TightDevice(FakeRunner):
    """State takes a byte a token, a chunk `chunk_cost` bytes a token while it runs; there is room for `limit` bytes."""

    def __init__(self, limit: int, chunk_cost: int = 0):
        super().__init__()
        self.limit, self.chunk_cost = limit, chunk_cost
        self.peaks: list[int] = []
        self.chunks: list[int] = []

    def decode(self, plan: StepPlan) -> StepOutput:
        return self._measured(super().decode(plan), 0)

    def prefill(self, chunks) -> StepOutput:
        longest = max(chunk.end - chunk.start for chunk in chunks)
        self.chunks.append(longest)
        return self._measured(super().prefill(chunks), longest * self.chunk_cost)

    def _measured(self, output: StepOutput, passing: int) -> StepOutput:
        kept = sum(len(ids) for ids in self.held.values())
        self.peaks.append(kept + passing)
        beyond = Overrun(peak_bytes=max(0, kept + passing - self.limit), kept_bytes=max(0, kept - self.limit))
        return StepOutput(**{name: getattr(output, name) for name in output.__slots__} | {"overrun": beyond})


def reckoned(num_bytes: int) -> MemoryBudget:
    return MemoryBudget(total_bytes=num_bytes + 2, weights_bytes=1, transient_bytes=1)


def pacer(max_chunk: int = 2048) -> PrefillPacer:
    return PrefillPacer(max_stall_s=10, max_chunk=max_chunk, tokens_per_s=1e6, overhead_s=0.001)


def check_replies(bench: Bench, seqs: list[Sequence]) -> None:
    for seq in seqs:
        assert bench.tokens(seq) == reply(seq.prompt.token_ids, seq.max_tokens, frozenset())


def test_chunks_become_shorter_first():
    bench = Bench()
    bench.runner = TightDevice(limit=6000, chunk_cost=12)
    seqs = [bench.add(1500, 3), bench.add(1500, 3)]
    bench.run()
    check_replies(bench, seqs)
    chunks = bench.runner.chunks
    assert chunks[0] * 12 > 6000 and chunks[1] == chunks[0] // 2
    assert bench.scheduler.pool.num_shortened >= 1
    assert bench.scheduler.num_preemptions == 0, "rows do not pay for what shorter chunks mend"


def test_chunks_grow_again_slowly():
    bench = Bench()
    bench.runner = TightDevice(limit=1 << 40)
    bench.pacer.shorten(400)
    seqs = [bench.add(9000, 1)]
    bench.run()
    check_replies(bench, seqs)
    chunks = bench.runner.chunks
    assert chunks[0] == 128 and max(chunks) == 256
    assert chunks.index(256) > 2


def test_rows_give_way_to_what_is_measured():
    bench = Bench(rows_bytes=4000)
    bench.runner = TightDevice(limit=2000)
    seqs = [bench.add(400, 300) for _ in range(5)]
    bench.run()
    check_replies(bench, seqs)
    assert bench.scheduler.num_preemptions
    assert max(bench.runner.peaks) < 2050, "it is heeded in the next step"


def test_where_nothing_fits_one_row_runs_at_a_time():
    bench = Bench()
    bench.runner = TightDevice(limit=10)
    seqs = [bench.add(100, 50) for _ in range(3)]
    bench.run()
    check_replies(bench, seqs)


@pytest.mark.parametrize(("num_tokens", "longest"), [(2048, 1024), (100, 64), (65, 64)])
def test_a_chunk_that_was_too_much_is_halved(num_tokens: int, longest: int):
    one = pacer()
    assert one.shorten(num_tokens)
    assert one.chunk_tokens(1000.0) == longest


def test_rows_side_by_side_again_once_the_pool_has_grown_back():
    bench = Bench(rows_bytes=1 << 20)
    old, young = bench.add(100, 1500), bench.add(100, 50)
    while not bench.seqs[1].output_token_ids:
        bench.step()
    bench.scheduler.pool.observe(StepOutput(overrun=Overrun(peak_bytes=1 << 19)))
    late = bench.add(10, 5)
    bench.step()
    assert bench.scheduler.num_preemptions == 1 and bench.scheduler.num_running == 1
    for _ in range(1200):
        bench.step()
    assert bench.tokens(late) and not old.finish_reason
    bench.run()
    check_replies(bench, [old, young, late])


def test_a_chunk_that_must_be_long_takes_it_from_the_pool():
    """An image's tokens are not parted in some families."""
    pool = MemoryPool(reckoned(10_000), pacer())
    for _ in range(3):
        pool.use(rows_bytes=5000, kept_bytes=4000)
        pool.observe(StepOutput(overrun=Overrun(peak_bytes=500), chunk_timings=(ChunkTiming(0, 256, 0.1),)))
    assert pool.num_bytes == 8500 and pool.num_shortened == 1


@pytest.mark.parametrize("max_chunk", [512, 2048])
def test_no_chunk_becomes_longer_by_being_too_long(max_chunk: int):
    one = pacer(max_chunk)
    one.observe_chunk(ChunkTiming(0, 4096, 0.001))
    one.shorten(4096)
    assert one.chunk_tokens(1000.0) <= max_chunk
    one.shorten(128)
    assert not one.shorten(1000)
    assert one.chunk_tokens(1000.0) == 64


def test_as_short_as_they_may_be_chunks_stay_so_while_memory_is_short():
    one = pacer()
    pool = MemoryPool(reckoned(10_000), one)
    one.shorten(128)
    for _ in range(8):
        chunk = ChunkTiming(0, one.chunk_tokens(1000.0), 0.001)
        assert chunk.num_tokens == 64
        pool.use(rows_bytes=5000, kept_bytes=4000)
        pool.observe(StepOutput(overrun=Overrun(peak_bytes=500), chunk_timings=(chunk,)))
    assert pool.num_shortened == 0 and pool.num_bytes == 8500


def test_a_length_that_was_too_long_is_tried_again_rarely():
    one = pacer()
    one.shorten(1000)
    lengths = []
    for _ in range(200):
        lengths.append(one.chunk_tokens(1000.0))
        one.lengthen(lengths[-1])
    assert lengths[0] == 500 and 900 < lengths[30] < 1000
    assert sum(earlier < 1000 <= later for earlier, later in pairwise(lengths)) == 1
    assert lengths.index(next(each for each in lengths if each >= 1000)) > 64


def test_a_warning_of_the_system_evicts_cached_state_once_and_preempts_nothing() -> None:
    pool = pool_of(10_000)
    pool.use(rows_bytes=8000, kept_bytes=2000)
    for _ in range(50):
        pool.observe(StepOutput(overrun=Overrun(pressure=Pressure.WARNING)))
    assert pool.num_bytes == 8000, "three quarters of 10,000, but never less than the rows take"
    assert pool.num_shortened == 1


def test_critical_pressure_halves_the_pool_and_it_grows_again_afterwards() -> None:
    pool = pool_of(10_000)
    pool.use(rows_bytes=8000, kept_bytes=2000)
    pool.observe(StepOutput(overrun=Overrun(pressure=Pressure.WARNING)))
    pool.observe(StepOutput(overrun=Overrun(pressure=Pressure.CRITICAL)))
    assert pool.num_bytes == 5000
    pool.observe(StepOutput(overrun=Overrun(pressure=Pressure.WARNING)))
    assert pool.num_bytes == 5000, "falling pressure changes nothing while it lasts"
    for _ in range(2000):
        pool.observe(StepOutput())
    assert pool.num_bytes == 10_000


@pytest.mark.parametrize(("pressure", "num_bytes"), [(Pressure.WARNING, 2500), (Pressure.CRITICAL, 1250)])
def test_a_pool_that_was_empty_when_pressure_rose_is_of_use_while_it_lasts(pressure: Pressure, num_bytes: int) -> None:
    """A Mac is often under pressure for hours, and most often while a model loads."""
    pool = pool_of(10_000)
    pool.use(rows_bytes=100, kept_bytes=0)
    pool.observe(StepOutput(overrun=Overrun(pressure=pressure)))
    assert pool.num_bytes <= 100
    for _ in range(2000):
        pool.observe(StepOutput(overrun=Overrun(pressure=pressure)))
    assert pool.num_bytes == num_bytes


def pool_of(rows_bytes: int) -> MemoryPool:
    return MemoryPool(reckoned(rows_bytes), pacer())
