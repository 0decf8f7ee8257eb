"""With `repeatable`, the chunks and batches of a sequence depend on nothing but the sequence."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mlx.core.sequence import Sequence

from .fake_runner import FakeRunner, reply
from .test_device_faults import Small
from .test_scheduler import Bench


class UnsteadyRunner(FakeRunner):
    """A device whose seconds per token change from chunk to chunk."""

    def __init__(self, seed: int):
        super().__init__()
        self._random = random.Random(seed)

    def prefill(self, chunks):
        self._s_per_token = 10 ** self._random.uniform(-5, -1)
        return super().prefill(chunks)


def bench_of(seed: int, **config) -> Bench:
    bench = Bench(repeatable=True, **config)
    bench.runner = UnsteadyRunner(seed)
    return bench


def chunks_of(bench: Bench, seq: Sequence) -> list[tuple[int, int]]:
    planned = (chunk for plan in bench.plans for chunk in plan.prefill if chunk.seq is seq)
    return [(chunk.start, chunk.end) for chunk in planned]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    others=st.lists(st.integers(1, 3000), max_size=5),
    num_before=st.integers(0, 5),
    length=st.sampled_from([1, 2, 255, 256, 257, 258, 1500]),
)
def test_chunks_end_at_fixed_places_and_rows_decode_alone(seed, others, num_before, length):
    bench = bench_of(seed)
    for num_prompt in others[:num_before]:
        bench.add(num_prompt, 40)
        bench.step()
    seq = bench.add(length, 30)
    for num_prompt in others[num_before:]:
        bench.add(num_prompt, 40)
    bench.run()
    edges = [*range(0, length - 1, 256), length - 1]
    assert chunks_of(bench, seq) == list(itertools.pairwise(edges))
    assert all(len(group) == 1 for plan in bench.plans for group in plan.decode)


@pytest.mark.parametrize("seed", range(3))
def test_a_preempted_row_computes_its_reply_again_as_it_was_decoded(monkeypatch, seed):
    """The device runs one token at a time in both cases, and so rounds alike."""
    monkeypatch.setattr("vllm_mlx.scheduler.memory_pool.RESERVED_OUTPUT", 0)
    bench = bench_of(seed, max_prefill_chunk=100, rows_bytes=1400)
    rows = [bench.add(400, 150) for _ in range(2)]
    bench.run()
    [preempted] = [seq for seq in rows if seq.num_preemptions]
    chunks = chunks_of(bench, preempted)
    assert chunks[:4] == [(0, 100), (100, 200), (200, 300), (300, 399)]
    again = chunks[chunks.index((0, 100), 1) :]
    assert again[:4] == chunks[:4]
    assert len(again) > 10 and all(end == start + 1 for start, end in again[4:])
    assert bench.tokens(preempted) == reply(preempted.prompt.token_ids, 150, frozenset())


def test_a_chunk_for_which_the_device_has_no_memory_runs_shorter():
    bench = Bench(repeatable=True)
    bench.runner = Small(100)
    seq = bench.add(700, 5)
    bench.run()
    assert bench.tokens(seq) == reply(seq.prompt.token_ids, 5, frozenset())
    done = [end - start for start, end in chunks_of(bench, seq) if end - start <= 100]
    assert done[:10] == [64] * 10 and bench.scheduler.num_restarts == 2, "256, then 128 tokens were refused"
