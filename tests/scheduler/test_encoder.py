"""Units of an encoder: their order, their limits, and what becomes of them after faults and aborts."""

import random
from array import array
from collections.abc import Iterator
from itertools import accumulate

import pytest

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import GenerationError
from vllm_mlx.core.memory import AttentionCost, MemoryBudget
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence, TokenizedTexts
from vllm_mlx.core.step import ChunkTiming, Encoded, PrefillChunk, SequenceUpdate, StepOutput
from vllm_mlx.scheduler.encoder import EncoderScheduler
from vllm_mlx.scheduler.prefill_pacer import PrefillPacer
from vllm_mlx.util.faults import Fault

STALL_S = 0.2
TOKENS_PER_S = 40_000.0
OVERHEAD_S = 0.002
PAIR_BYTES = 4


class Encoders:
    """A scheduler of an encoder on a device whose time grows with the padded tokens. A vector is its text's place."""

    def __init__(self, *, room_bytes: int = 1 << 30, max_chunk: int = 8192):
        self.scheduler = EncoderScheduler(
            EngineConfig(model="tiny"),
            memory=MemoryBudget(total_bytes=1 << 32, weights_bytes=1, transient_bytes=1),
            pacer=PrefillPacer(
                max_stall_s=STALL_S, max_chunk=max_chunk, tokens_per_s=TOKENS_PER_S, overhead_s=OVERHEAD_S
            ),
            attention=AttentionCost(bytes_per_pair=PAIR_BYTES, room_bytes=room_bytes),
        )
        self.now_s = 0.0
        self.units: list[tuple[PrefillChunk, ...]] = []
        self.ended: dict[int, SequenceUpdate] = {}
        self.known: list[int] = []  # the texts whose vectors are known, by the updates
        self._num = 0

    def ask(self, lengths: list[int], tenant: str = "") -> int:
        self._num += 1
        texts = TokenizedTexts(ids=array("I", [1] * sum(lengths)), ends=tuple(accumulate(lengths)))
        prompt = PromptInputs(token_ids=(), texts=texts)
        self.scheduler.add(
            Sequence(seq_id=self._num, prompt=prompt, sampling=TokenSampling(), max_tokens=0, tenant=tenant)
        )
        return self._num

    def plan(self) -> tuple[PrefillChunk, ...]:
        unit = self.scheduler.schedule(self.now_s).prefill
        if unit:
            self.units.append(unit)
        return unit

    def seconds(self, unit: tuple[PrefillChunk, ...]) -> float:
        return OVERHEAD_S + longest(unit) * len(unit) / TOKENS_PER_S

    def take(self, output: StepOutput) -> None:
        for update in self.scheduler.update(output):
            self.known.append(update.num_encoded)
            if update.finish_reason is not None or update.error is not None:
                self.ended[update.seq_id] = update

    def step(self) -> None:
        if unit := self.plan():
            self.now_s += self.seconds(unit)
            timing = ChunkTiming(longest(unit), longest(unit) * len(unit), self.seconds(unit))
            done = [Encoded(each.seq.seq_id, each.start, each.end - each.start, each.start) for each in unit]
            self.take(StepOutput(encoded=tuple(done), chunk_timings=(timing,)))

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def check(self, asked: dict[int, list[int]]) -> None:
        """Each text was computed once, and its vector stands in its place."""
        for seq_id, lengths in asked.items():
            assert list(self.ended[seq_id].vectors) == list(accumulate(lengths, initial=0))[:-1]
        computed = sorted((chunk.seq.seq_id, chunk.start, chunk.end) for unit in self.units for chunk in unit)
        assert len(computed) == len(set(computed))
        assert len(computed) == sum(map(len, asked.values()))


def longest(unit: tuple[PrefillChunk, ...]) -> int:
    return max(chunk.end - chunk.start for chunk in unit)


def real_tokens(units: list[tuple[PrefillChunk, ...]]) -> int:
    return sum(chunk.end - chunk.start for unit in units for chunk in unit)


def padded_tokens(units: list[tuple[PrefillChunk, ...]]) -> int:
    return sum(longest(unit) * len(unit) for unit in units)


def log_normal(rng: random.Random, number: int) -> list[int]:
    return [min(2048, max(3, int(rng.lognormvariate(5.0, 0.8)))) for _ in range(number)]


def test_each_update_says_how_many_texts_are_known() -> None:
    encoders = Encoders(max_chunk=64)
    encoders.ask([60] * 3)
    encoders.run()
    assert [known for known in encoders.known if known] == [1, 2, 3]


@pytest.mark.parametrize("num_requests", [1, 5, 40])
def test_ten_thousand_chunks_are_hardly_padded(num_requests: int) -> None:
    encoders, rng = Encoders(), random.Random(num_requests)
    parts = [log_normal(rng, 10_000 // num_requests) for _ in range(num_requests)]
    asked = {encoders.ask(lengths): lengths for lengths in parts}
    encoders.run()
    encoders.check(asked)
    assert padded_tokens(encoders.units) <= 1.15 * real_tokens(encoders.units)
    assert max(map(encoders.seconds, encoders.units)) <= STALL_S


def test_short_texts_of_unlike_lengths_share_a_unit_where_a_unit_of_its_own_costs_more() -> None:
    encoders = Encoders()
    encoders.ask([10, 20, 60, 40])
    encoders.ask([30])
    encoders.run()
    assert len(encoders.units) == 1


def test_a_small_request_of_another_key_ends_before_a_large_one() -> None:
    encoders = Encoders()
    large = encoders.ask([512] * 2048, tenant="ann")
    for _ in range(3):
        encoders.step()
    small = encoders.ask([5], tenant="ben")
    encoders.step()
    encoders.step()
    assert small in encoders.ended
    assert large not in encoders.ended


def test_requests_of_one_key_take_turns() -> None:
    encoders = Encoders()
    large = encoders.ask([512] * 2048)
    encoders.step()
    small = encoders.ask([5, 900])
    for _ in range(4):
        encoders.step()
    assert small in encoders.ended
    assert large not in encoders.ended


def test_scores_of_long_texts_stay_within_their_room() -> None:
    encoders = Encoders(room_bytes=PAIR_BYTES * 1000**2)
    encoders.ask([1000, 999, 500, 500, 500, 500, 500, 60, 60])
    encoders.run()
    assert all(PAIR_BYTES * len(unit) * longest(unit) ** 2 <= PAIR_BYTES * 1000**2 for unit in encoders.units)
    assert max(map(len, encoders.units)) > 1


def test_a_text_that_takes_longer_than_the_stall_budget_runs_alone() -> None:
    encoders = Encoders()
    asked = {encoders.ask([20_000, 19_000]): [20_000, 19_000]}
    encoders.run()
    encoders.check(asked)
    assert [len(unit) for unit in encoders.units] == [1, 1]


def test_texts_of_an_aborted_request_leave_before_the_next_unit() -> None:
    encoders = Encoders()
    first, second = encoders.ask([400] * 500), encoders.ask([300] * 50)
    encoders.step()
    encoders.scheduler.abort(first)
    before = len(encoders.units)
    encoders.run()
    assert all(chunk.seq.seq_id == second for unit in encoders.units[before:] for chunk in unit)
    assert not encoders.scheduler.num_running
    assert not encoders.scheduler.turns.num_here


def test_a_step_that_another_model_needs_has_no_unit() -> None:
    encoders = Encoders()
    encoders.ask([100])
    encoders.scheduler.prefill.beside_s = 0.0
    assert not encoders.plan()
    encoders.scheduler.prefill.beside_s = 0.05
    encoders.ask([100] * 100)
    assert encoders.seconds(encoders.plan()) <= 0.05


def failures(encoders: Encoders) -> Iterator[None]:
    """Lose a unit in each way in which a device can, and go on."""
    unit = encoders.plan()
    encoders.scheduler.recover(GenerationError("a fault"), Fault.FAILED)
    yield
    unit = encoders.plan()
    refused = tuple((seq.seq_id, longest(unit) * len(unit)) for seq in dict.fromkeys(each.seq for each in unit))
    encoders.take(StepOutput(refused=refused))
    yield
    unit = encoders.plan()
    encoders.take(StepOutput(suspects=tuple(dict.fromkeys(chunk.seq.seq_id for chunk in unit))))
    yield


def test_no_text_is_lost_to_a_fault() -> None:
    encoders, rng = Encoders(), random.Random(3)
    parts = [log_normal(rng, 300) for _ in range(3)]
    asked = {encoders.ask(lengths): lengths for lengths in parts}
    lost: list[tuple[PrefillChunk, ...]] = []
    encoders.step()
    for _ in failures(encoders):
        lost.append(encoders.units.pop())
        encoders.step()
    encoders.run()
    assert all(lost)
    encoders.check(asked)


def test_requests_that_shared_a_failed_unit_run_apart() -> None:
    encoders = Encoders()
    first, second = encoders.ask([100] * 3), encoders.ask([100] * 3)
    unit = encoders.plan()
    assert {chunk.seq.seq_id for chunk in unit} == {first, second}
    encoders.take(StepOutput(suspects=(first, second)))
    [failed] = {chunk.seq.seq_id for chunk in encoders.plan()}
    encoders.take(StepOutput(failed=((failed, GenerationError("its text")),)))
    encoders.run()
    assert encoders.ended[failed].error is not None
    assert encoders.ended[first + second - failed].vectors == [0, 100, 200]
