"""What is measured against what was reckoned: a device that takes more than the budget says."""

from itertools import pairwise

import pytest

from vllm_mlx.core.memory import Overrun
from vllm_mlx.core.sequence import Sequence
from vllm_mlx.core.step import StepOutput, StepPlan
from vllm_mlx.scheduler.pacing import PrefillPacer

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


def check_replies(bench: Bench, seqs: list[Sequence]) -> None:
    for seq in seqs:
        assert bench.tokens(seq) == reply(seq.prompt.token_ids, seq.max_tokens, frozenset())


def test_chunks_become_shorter_first():
    bench = Bench()
    bench.runner = TightDevice(limit=6000, chunk_cost=10)
    seqs = [bench.add(1500, 3), bench.add(1500, 3)]
    bench.run()
    check_replies(bench, seqs)
    chunks = bench.runner.chunks
    assert chunks[0] * 10 > 6000 and chunks[1] == chunks[0] // 2
    assert bench.scheduler.pool.num_shortened >= 1
    assert bench.scheduler.num_preemptions == 0, "rows do not pay for what shorter chunks mend"


def test_chunks_grow_again_slowly():
    bench = Bench()
    bench.runner = TightDevice(limit=1 << 40)
    pacer = bench.scheduler._pacer
    pacer.shorten(400)
    seqs = [bench.add(9000, 1)]
    bench.run()
    check_replies(bench, seqs)
    chunks = bench.runner.chunks
    assert chunks[0] == 200 and max(chunks) > 400
    assert all(later <= 1.1 * earlier for earlier, later in pairwise(chunks))


def test_rows_give_way_to_what_is_measured():
    bench = Bench()
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
    pacer = PrefillPacer(max_stall_s=10, max_chunk=2048, tokens_per_s=1000, overhead_s=0.001)
    assert pacer.shorten(num_tokens)
    assert pacer.chunk_tokens(1000.0) == longest
    assert not pacer.shorten(64)
