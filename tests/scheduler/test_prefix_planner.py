"""The scheduler with a prefix cache, against a fake device whose copies know their tokens: exact, and nothing lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cache.fakes import FakeSegment, FakeState
from tests.support.drawing import examples
from tests.support.integrity import check_integrity
from tests.support.rows import row
from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.cache.tree import NEAR_FORK, MemoryAwarePrefixCache
from vllm_mlx.cache.victims import unevictable_bytes
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import GenerationError
from vllm_mlx.core.memory import MemoryBudget, RowFootprint
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.core.step import Capture, PrefillChunk, Restore, Snapshot, StepOutput, StepPlan
from vllm_mlx.scheduler.depth import DepthController
from vllm_mlx.scheduler.image_planner import MLLMScheduler
from vllm_mlx.scheduler.prefill_pacer import PrefillPacer
from vllm_mlx.scheduler.prefix_planner import PrefixPlanner
from vllm_mlx.scheduler.scheduler import Scheduler
from vllm_mlx.scheduler.speculation import MOST, Speculation

from .fake_runner import FakeRunner, reply

STATE_BYTES = 700
SLICEABLE, STATEFUL = ResumeRule(), ResumeRule(needs_state=True)
FOOTPRINTS = {
    SLICEABLE: RowFootprint(bytes_per_token=740),
    STATEFUL: RowFootprint(bytes_per_token=740, fixed_bytes=STATE_BYTES),
}


class CopyingRunner(FakeRunner):
    """Carries out captures and restores, and checks that what it is given is what it would have computed."""

    def decode(self, plan: StepPlan) -> StepOutput:
        snapshots = tuple(self._copy(capture) for capture in plan.captures)
        for seq_id in plan.release:
            self._drop(seq_id)
        for restore in plan.restores:
            self._restore(restore)
        output = super().decode(plan)
        return StepOutput(tokens=output.tokens, snapshots=snapshots)

    def prefill(self, chunks: tuple[PrefillChunk, ...]) -> StepOutput:
        outputs, snapshots = [], []
        for chunk in chunks:
            outputs.append(super().prefill((chunk,)))
            if chunk.capture is not None:
                snapshots.append(self._copy(chunk.capture))
        return StepOutput(
            prefilled=tuple(each for output in outputs for each in output.prefilled),
            chunk_timings=tuple(each for output in outputs for each in output.chunk_timings),
            snapshots=tuple(snapshots),
        )

    def _copy(self, capture: Capture) -> Snapshot:
        held = self.held[capture.seq.seq_id]
        assert len(held) == capture.row_length
        segment = FakeSegment(tuple(held[capture.start : capture.end]), capture.start, capture.start)
        return Snapshot(capture, segment, capture.start, FakeState(capture.end, STATE_BYTES))

    def _restore(self, restore: Restore) -> None:
        match, seq = restore.match, restore.seq
        tokens = [token for piece in match.pieces for token in piece.segment.tokens[: piece.take]]
        assert tokens == seq.tokens(0, match.length)
        assert match.state is None or match.state.position == match.length
        self.held[seq.seq_id] = tokens


class Bench:
    def __init__(
        self,
        rule: ResumeRule,
        *,
        rows_bytes: int = 1 << 40,
        max_stall_s: float = 0.2,
        max_chunk: int = 64,
        speculation: Speculation | None = None,
        images: MLLMScheduler | None = None,
    ):
        config = EngineConfig(model="fake", max_num_seqs=3)
        self.tree = MemoryAwarePrefixCache(max_bytes=rows_bytes, min_cut=1)
        self.cache = PrefixPlanner(
            self.tree, "model", rule, FOOTPRINTS[rule], max_bytes=rows_bytes, snapshot_every=config.snapshot_every
        )
        self.scheduler = Scheduler(
            config,
            memory=MemoryBudget(total_bytes=rows_bytes + 2, weights_bytes=1, transient_bytes=1),
            footprint=FOOTPRINTS[rule],
            pacer=PrefillPacer(max_stall_s=max_stall_s, max_chunk=max_chunk, tokens_per_s=1000, overhead_s=0.001),
            prefix_cache=self.cache,
            speculation=speculation,
            images=images,
        )
        self.runner = CopyingRunner()
        self.seqs: list[Sequence] = []
        self._now = 0.0

    def add(self, token_ids: list[int], *, max_tokens: int = 4, points: tuple[int, ...] = ()) -> Sequence:
        prompt = PromptInputs(token_ids=tuple(token_ids), snapshot_points=points)
        seq = Sequence(seq_id=len(self.seqs), prompt=prompt, sampling=None, max_tokens=max_tokens)  # type: ignore[arg-type]
        self.seqs.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self) -> None:
        self._now += 1.0
        plan = self.scheduler.schedule(self._now)
        pinned = unevictable_bytes(self.tree.pins.values())
        self.scheduler.update(self.runner.decode(plan))
        if plan.prefill:
            self.scheduler.update(self.runner.prefill(plan.prefill))
        check_integrity(self.tree)
        assert self.tree.used_bytes <= max(self.tree.max_bytes, pinned)  # a restore's source goes a step later

    def run(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler never comes to rest")

    def check_replies(self) -> None:
        for seq in self.seqs:
            assert seq.output_token_ids == reply(seq.prompt.token_ids, seq.max_tokens, frozenset())


def ids(num_tokens: int, seed: int = 0) -> list[int]:
    return [(seed * 17 + 5 * index + index // 7) % 50 for index in range(num_tokens)]


turns = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 40, 90, 130]),  # tokens of the longest prompt so far that it keeps, 0: all
        st.integers(1, 120),  # tokens that follow
        st.integers(0, 3),  # their seed
        st.integers(0, 12),  # steps before the next arrival
        st.integers(0, 5),  # tokens beyond the prompt that the last turn turns out to have been worth
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(50), deadline=None)
@given(turns, st.sampled_from([SLICEABLE, STATEFUL]), st.sampled_from([1 << 40, 900_000]))
def test_every_reply_is_exact_and_no_copy_is_lost(load, rule, rows_bytes):
    bench = Bench(rule, rows_bytes=rows_bytes)
    history: list[int] = []
    for kept, num_new, seed, num_steps, worth in load:
        history = (history[:kept] if kept else history) + ids(num_new, seed)
        seq = bench.add(history, points=(len(history) // 2, len(history) - 1))
        for _ in range(num_steps):
            bench.step()
        bench.scheduler.keep(seq, seq.num_prompt_tokens + worth)
        if seq.finish_reason is not None:
            history = [*history, *seq.output_token_ids[:worth]]
    bench.run()
    bench.check_replies()
    if rows_bytes == 1 << 40:
        assert bench.tree.stats.inserts_unattached == 0


def test_cached_state_gives_way_to_the_states_that_drafts_record() -> None:
    depth = DepthController(MOST, fixed=True)
    speculation = Speculation(depth, 1000, shares_forward=True, state_bytes=50_000, has_head=False)
    bench = Bench(STATEFUL, rows_bytes=1_500_000, speculation=speculation)
    for seed in range(4):
        bench.add(ids(400, seed), max_tokens=1)
        bench.run()
    bench.add(ids(20, seed=5), max_tokens=60).prediction = tuple(ids(60))
    while not (plan := bench.scheduler.schedule()).drafts:
        bench.scheduler.update(bench.runner.decode(plan))
        bench.scheduler.update(bench.runner.prefill(plan.prefill))
    assert speculation.recorded_bytes == (1 + MOST) * 50_000
    left_bytes = bench.scheduler.pool.num_bytes - bench.scheduler.room.rows_bytes()
    assert 0 < bench.tree.used_bytes <= left_bytes - speculation.recorded_bytes


@pytest.mark.parametrize("rule", [SLICEABLE, STATEFUL])
def test_what_a_copy_under_way_goes_on_from_is_not_trimmed(rule):
    """A reply's end is found worthless just when the next turn, which shares a token of it, is captured."""
    bench = Bench(rule)
    first = bench.add(ids(100))
    bench.run()
    shared = [*ids(100), first.output_token_ids[0]]
    second = bench.add([*shared, *ids(40, seed=3)])
    bench.scheduler.keep(first, 100)
    bench.run()
    assert second.num_cached_tokens >= 99
    third = bench.add([*shared, *ids(40, seed=3), 1])
    bench.run()
    assert third.num_cached_tokens >= len(shared) + 39
    assert bench.tree.stats.inserts_unattached == 0


@pytest.mark.parametrize("num_steps", [1, 4, 6])
@pytest.mark.parametrize("is_known_first", [False, True])
@pytest.mark.parametrize("rule", [SLICEABLE, STATEFUL])
def test_an_aborted_sequence_leaves_what_is_worth_keeping(rule, is_known_first: bool, num_steps: int):
    """Whether its worth is known before or after it has ended: while it prefills, and while it decodes."""
    bench = Bench(rule)
    prompt = ids(150)
    aborted = bench.add(prompt, max_tokens=50)
    for _ in range(num_steps):
        bench.step()
    if is_known_first:
        bench.scheduler.keep(aborted, 150)
        bench.step()
    num_computed = aborted.num_computed_tokens
    bench.scheduler.abort(aborted.seq_id)
    bench.run()
    if not is_known_first:
        bench.scheduler.keep(aborted, 150)
        bench.run()
    assert all(entry.end <= 150 for entry in bench.tree.entries())
    again = bench.add(prompt)
    bench.run()
    assert again.num_cached_tokens == min(149, num_computed)


def test_where_two_prompts_part_a_third_resumes():
    bench = Bench(STATEFUL)
    for seed in (1, 2):
        bench.add([*ids(600), *ids(300, seed)])
        bench.run()
    third = bench.add([*ids(600), *ids(300, 3)])
    bench.run()
    common = next(n for n in range(600, 900) if ids(300, 1)[n - 600] != ids(300, 2)[n - 600])
    assert third.num_cached_tokens == common - NEAR_FORK
    bench.check_replies()


@row("S4-6")
@pytest.mark.parametrize("rule", [SLICEABLE, STATEFUL])
def test_an_aborted_prefill_goes_on_from_the_last_of_its_points_8192_tokens_apart(rule):
    """With the setting that a server has."""
    bench = Bench(rule, max_stall_s=3600, max_chunk=2048)
    aborted = bench.add(ids(30_000))
    while aborted.num_computed_tokens < 17_000:
        bench.step()
    assert [entry.end for entry in bench.tree.entries()] == [8192, 16_384]
    bench.scheduler.abort(aborted.seq_id)
    bench.run()
    again = bench.add([*ids(16_500), 49, 49, 49], max_tokens=1)
    bench.run()
    assert again.num_cached_tokens >= 16_384


def test_a_short_stretch_is_not_worth_a_copy():
    bench = Bench(STATEFUL)
    for seed in (1, 2, 3):
        seq = bench.add([*ids(200), *ids(30, seed)])
        bench.run()
    assert seq.num_cached_tokens == 0


def test_a_row_whose_leaving_broke_half_way_begins_from_nothing_where_it_is_not_found(monkeypatch):
    bench = Bench(SLICEABLE)
    old, young = bench.add(ids(100, 1), max_tokens=40), bench.add(ids(100, 2), max_tokens=40)
    while not young.num_output_tokens:
        bench.step()

    def broken(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(bench.cache, "shrink_to", broken)
        bench.scheduler.pool.num_bytes = 0
        with pytest.raises(MemoryError):
            bench.scheduler.schedule(0.0)
    bench.scheduler.pool.num_bytes = 1 << 40
    bench.runner.reset()
    assert [update.seq_id for update in bench.scheduler.recover(GenerationError("broken"))] == [old.seq_id]
    with monkeypatch.context() as patch:
        patch.setattr(bench.tree, "match", broken)
        bench.step()
    bench.run()
    assert young.output_token_ids == reply(young.prompt.token_ids, 40, frozenset())


def test_a_plan_that_fails_leaves_nothing_pinned() -> None:
    bench = Bench(STATEFUL)
    prompt = list(range(1, 90))
    bench.add(prompt)
    bench.run()
    bench.add([*prompt, 7, 8], points=(None,))  # type: ignore[arg-type]  # a bug of the code before
    with pytest.raises(TypeError):
        bench.scheduler.schedule(99.0)
    failed = bench.scheduler.recover(GenerationError("It failed."))
    assert [update.seq_id for update in failed] == [1] and bench.tree.used_bytes > 0
    bench.tree.clear()
    assert bench.tree.used_bytes == 0
