"""Where prefill chunks end: on a grid, the same on an idle server, and within the time that replies may pause."""

from itertools import pairwise

import pytest

from tests.support.device_model import Device
from tests.support.device_serving import pacer_of
from vllm_mlx.core.memory import AttentionCost
from vllm_mlx.core.step import ChunkTiming
from vllm_mlx.scheduler.prefill_pacer import GRID, Budget, PrefillPacer

from .computed_runner import Clock, ComputedRunner, device, exact
from .test_scheduler import Bench

POWERS = [64 << power for power in range(6)]


def chunk_s(num_tokens: int, start: int, per_token: float = 0.001, per_pair: float = 1e-7) -> float:
    """A machine whose attention costs something."""
    return 0.002 + per_token * num_tokens + per_pair * num_tokens * (start + num_tokens / 2)


def given(tokens_per_s: float, overhead_s: float, **settings) -> PrefillPacer:
    return PrefillPacer(max_stall_s=0.2, max_chunk=2048, tokens_per_s=tokens_per_s, overhead_s=overhead_s, **settings)


def prefill(pacer: PrefillPacer, length: int, **speed) -> list[float]:
    """Seconds of the chunks of one prompt, planned for a stall budget of 0.2 s."""
    seconds, start = [], 0
    while start < length:
        num_tokens = min(length - start, pacer.chunk_tokens(0.2, start))
        seconds.append(chunk_s(num_tokens, start, **speed))
        pacer.observe_chunk(ChunkTiming(start, num_tokens, seconds[-1]))
        start += num_tokens
    return seconds


def edges(pacer: PrefillPacer, machine: Device, clock: Clock, cuts: list[int], start: int = 0) -> list[int]:
    """Where the chunks of a prompt end while nothing else runs. Each must end at the next cut at the latest."""
    ends = []
    for cut in cuts:
        while start < cut:
            end = min(cut, pacer.chunk_end(start, pacer.budget(decoding=False)))
            pacer.observe_chunk(ChunkTiming(start, end - start, clock(machine.chunk_s(end - start, start))))
            ends.append(end)
            start = end
    return ends


def test_it_keeps_to_the_budget_while_attention_grows():
    pacer = given(980, 0.002)
    for _ in range(3):
        seconds = prefill(pacer, 20_000)
        assert max(seconds) <= 1.3 * 0.2
        assert sorted(seconds)[len(seconds) // 2] >= 0.8 * 0.2


def test_it_learns_that_the_machine_became_slower_or_faster():
    pacer = given(980, 0.002)
    prefill(pacer, 5_000)
    slow = prefill(pacer, 5_000, per_token=0.002)
    assert sum(second > 0.3 for second in slow) <= 4, "one at each depth"
    assert max(prefill(pacer, 5_000, per_token=0.002)) <= 0.25
    fast = prefill(pacer, 20_000, per_token=0.0005)
    assert max(fast) <= 0.26
    assert sorted(fast)[len(fast) // 2] >= 0.15


def test_many_short_prompts_do_not_make_a_long_one_look_cheap():
    pacer = given(980, 0.002)
    prefill(pacer, 10_000)
    for _ in range(300):
        pacer.observe_chunk(ChunkTiming(0, 20, 0.0021))  # hardly more than the overhead of any chunk
    assert max(prefill(pacer, 10_000)) <= 0.27


def test_a_long_prompt_does_not_make_the_beginning_of_the_next_one_look_slow():
    machine = device("M1", "Qwen3 0.6B")
    pacer = pacer_of(machine)
    edges(pacer, machine, exact, [60_000])
    assert pacer.chunk_s(256, 0) == pytest.approx(machine.chunk_s(256, 0), rel=0.25)
    assert pacer.chunk_s(256, 60_000) == pytest.approx(machine.chunk_s(256, 60_000), rel=0.25)


def test_the_first_chunk_beside_replies_is_not_much_longer_than_any_measured():
    pacer = given(100_000, 0.0)
    assert pacer.chunk_tokens(0.2) == 512
    assert pacer.chunk_tokens(1.0) == 2048, "with no reply to disturb there is no need for care"


def test_it_counts_the_decode_step_in_the_stall():
    pacer = given(1000, 0.0)
    pacer.observe_decode(0.05)
    assert pacer.chunk_tokens(pacer.budget(decoding=True).seconds) == 150
    assert pacer.chunk_end(0, pacer.budget(decoding=True)) == 128
    pacer.observe_decode(10.0)
    assert pacer.chunk_end(0, pacer.budget(decoding=True)) == GRID


@pytest.mark.parametrize("tokens_per_s", [90, 450, 3000])
def test_on_an_idle_server_chunks_end_at_multiples_of_their_length(tokens_per_s):
    pacer = given(tokens_per_s, 0.01)
    ends, start = [0], 0
    while start < 20_000:
        start = pacer.chunk_end(start, pacer.budget(decoding=False))
        ends.append(start)
    lengths = [later - earlier for earlier, later in pairwise(ends)]
    assert set(lengths) <= set(POWERS) and max(lengths) == {90: 64, 450: 256, 3000: 2048}[tokens_per_s]
    assert all(end % length == 0 for end, length in zip(ends[1:], lengths, strict=True))


@pytest.mark.parametrize(("factor", "length"), [(3, 256), (1 / 3, 2048)])
def test_where_a_machine_has_become_slower_or_faster_for_long_lengths_change(factor, length):
    machine = device("M4 Max", "Qwen3 8B")
    pacer = pacer_of(machine)
    assert edges(pacer, machine, exact, [8000])[0] == 512
    for _ in range(16):
        ends = edges(pacer, machine, lambda seconds: factor * seconds, [8000])
    assert ends[0] == length


@pytest.mark.parametrize("decoding", [False, True])
def test_after_a_cut_chunks_return_to_the_grid(decoding):
    """A resume point, an image, or a prompt that was resumed at any place."""
    pacer = given(1000, 0.002)
    budget = pacer.budget(decoding=decoding)
    grid = 64 if decoding else 512
    for start in (1, 63, 64, 65, 500, 511, 513, 1000, 2047):
        end = pacer.chunk_end(start, budget)
        assert end % 64 == 0 and end - start >= 64, "no chunk for a few tokens before the next edge"
        while end % grid:
            end = pacer.chunk_end(end, budget)
        assert pacer.chunk_end(end, budget) % grid == 0


def test_beside_replies_all_chunks_end_on_the_grid_but_the_last():
    machine = device("M4 Max", "Qwen3 8B")
    bench, _ = beside_a_reply(machine, 5000)
    ends = [chunk.end for plan in bench.plans for chunk in plan.prefill if chunk.seq.seq_id == 1]
    assert ends[-1] == 4999 and len(ends) > 20
    assert all(end % GRID == 0 for end in ends[:-1])


@pytest.mark.parametrize(("start", "end"), [(27_797, 27_840), (27_824, 27_840), (27_825, 27_840), (27_840, 27_904)])
def test_beside_replies_of_a_slow_machine_a_return_to_the_grid_is_short(start, end):
    assert given(100, 0.1).chunk_end(start, Budget(0.2)) == end


def test_memory_may_force_shorter_chunks_than_the_grid_has():
    pacer = given(1000, 0.002, attention=AttentionCost(bytes_per_pair=1, room_bytes=50 * 4000))
    for budget in (pacer.budget(decoding=False), pacer.budget(decoding=True)):
        start = 4000
        while start < 4200:
            end = pacer.chunk_end(start, budget)
            assert (end - start) * end <= 50 * 4000 and (end % 16 == 0 or end - start < 16)
            start = end


@pytest.mark.parametrize(("half_share", "length"), [(0.5, 32), (0.8, 32), (0.85, 64), (1.0, 64)])
def test_a_chunk_is_half_as_long_where_that_shortens_a_pause(half_share, length):
    """Products of many tokens cost by tiles of 32 or 64 tokens; a mixture of experts reads its weights in any case."""
    pacer = given(300, 0.1, half_share=half_share)
    assert pacer.chunk_end(0, Budget(0.05)) == length
    assert pacer.chunk_end(0, Budget(0.35)) == 64, "it fits"
    assert pacer.chunk_end(20, Budget(0.05)) == {32: 32, 64: 64}[length]


def test_the_pause_that_nobody_gave_is_two_steps_or_the_default():
    pacer = PrefillPacer(max_stall_s=None, max_chunk=2048, tokens_per_s=1000, overhead_s=0.01)
    assert pacer.max_stall_s == 0.2
    pacer = PrefillPacer(max_stall_s=None, max_chunk=2048, tokens_per_s=1000, overhead_s=0.06)
    for _ in range(20):
        pacer.observe_decode(0.08)
    assert pacer.max_stall_s == pytest.approx(2 * (0.06 + 0.08), rel=0.01)
    assert pacer.budget(decoding=True).seconds == pytest.approx(0.28 - 0.08, rel=0.01)
    pacer.observe_decode(5.0)
    assert pacer.max_stall_s < 0.29, "one slow step is no reason for long pauses"
    assert pacer.budget(decoding=True).seconds == 0


@pytest.mark.parametrize(("max_stall_s", "idle_s"), [(None, 1.0), (0.05, 0.25), (0.2, 1.0), (0.7, 1.0), (3.0, 3.0)])
def test_an_idle_step_takes_a_second_at_most_unless_a_pause_is_longer(max_stall_s, idle_s):
    pacer = PrefillPacer(max_stall_s=max_stall_s, max_chunk=2048, tokens_per_s=1000, overhead_s=0.5)
    assert pacer.budget(decoding=False) == Budget(idle_s, is_idle=True)
    assert pacer.budget(decoding=True).seconds <= idle_s
    assert not pacer.budget(decoding=False, most_s=0.1).is_idle, "others may come"


def beside_a_reply(machine: Device, length: int, *, max_stall_s: float | None = None) -> tuple[Bench, float]:
    """One reply decodes when a prompt of `length` tokens comes. Returns the seconds until that one's first token."""
    bench = Bench(pacer=pacer_of(machine, max_stall_s=max_stall_s))
    runner = bench.runner = ComputedRunner(machine)
    reply = bench.add(500, 100_000)
    while reply.num_output_tokens < 5:
        bench.step()
    sent_s = runner.now_s
    runner.token_times = {reply.seq_id: [sent_s]}
    prompt = bench.add(length, 2)
    while not prompt.output_token_ids:
        bench.step()
    return bench, runner.token_times[prompt.seq_id][0] - sent_s


@pytest.mark.parametrize(
    ("chip", "shape", "before", "least", "gap_s"),
    [  # prompt tokens per second with chunks of 16 tokens and more in 200 ms, as before; least now; worst gap now
        ("M3 Pro", "Qwen3.8 27B", 33, 60, 0.57),
        ("M4 Pro", "Qwen3.8 27B", 44, 84, 0.42),
        ("M4 Max", "Qwen3.8 27B", 89, 165, 0.28),
        ("M1 Pro", "Qwen3 8B", 100, 145, 0.33),
        ("M4 Max", "Qwen3 8B", 472, 490, 0.25),
        ("M4 Pro", "Qwen3 30B-A3B", 275, 250, 0.23),
        ("M3 Ultra", "gpt-oss 120B", 933, 900, 0.25),
        ("M4 Max", "GLM-4.5-Air 106B", 98, 135, 0.33),
        ("M3 Ultra", "Llama 3.3 70B", 50, 92, 0.42),
    ],
)
def test_a_prompt_of_20k_tokens_beside_a_reply(chip, shape, before, least, gap_s):
    bench, first_s = beside_a_reply(device(chip, shape), 20_000)
    assert 0.9 * before < least < 20_000 / first_s
    assert bench.runner.worst_gap_s(0) <= gap_s


@pytest.mark.parametrize("max_stall_s", [0.1, 0.2, 0.4])
def test_a_pause_that_was_given_is_kept_where_the_shortest_chunk_allows(max_stall_s):
    machine = device("M5 Max", "Qwen3 8B")
    bench, _ = beside_a_reply(machine, 10_000, max_stall_s=max_stall_s)
    assert 0.7 * max_stall_s < bench.runner.worst_gap_s(0) <= 1.25 * max_stall_s


def test_a_chunk_is_shorter_by_the_share_of_its_log_probabilities() -> None:
    """Tokens and their log-probabilities take together what tokens alone may take."""
    pacer = given(tokens_per_s=1000, overhead_s=0.01)
    assert pacer.scored_tokens(100, 0) == 100, "nothing is known"
    for score_s, num_tokens in ((0.05, 100), (0.4, 40)):
        pacer.observe_chunk(ChunkTiming(0, num_tokens, 0.01 + num_tokens / 1000, score_s))
        for planned in (1, 20, 256):
            scored = pacer.scored_tokens(planned, 0)
            seconds = 0.01 + scored / 1000 + scored * score_s / num_tokens
            assert 1 <= scored <= planned and (scored == 1 or seconds <= 0.01 + planned / 1000 + 1e-9)
    pacer.observe_chunk(ChunkTiming(0, 100, 0.11))
    assert pacer.scored_tokens(100, 0) < 20, "a chunk without says nothing of them"
