"""Beginnings of next prompts: they run while nothing else does, and give way without a loss."""

from dataclasses import replace

import pytest

from tests.cache.fakes import put, resumed, tree_of
from tests.support.agent_sessions import REPLY_TOKENS, SESSIONS
from tests.support.device_catalogue import CHIPS, SHAPES
from tests.support.device_model import Device
from tests.support.device_serving import Serving
from tests.support.rows import cases
from vllm_mlx.cache.index import pack
from vllm_mlx.cache.media import MediaCache
from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.core.errors import GenerationError
from vllm_mlx.core.sequence import MediaItem, PromptInputs, Sequence
from vllm_mlx.scheduler.ahead import MAX_CHUNK_S
from vllm_mlx.scheduler.image_planner import MLLMScheduler

from .test_image_planner import Features
from .test_prefix_planner import SLICEABLE, STATEFUL, Bench, ids

HEAD = ids(200)
RUN, SHORT = ids(300, 1), ids(400, 2)  # the last turns as they were, and as the next prompt writes them
RULES = pytest.mark.parametrize("rule", [SLICEABLE, STATEFUL])


def following(token_ids: list[int]) -> PromptInputs:
    return PromptInputs(token_ids=(*token_ids, 0))


def answered(bench: Bench, next_ids: list[int] = HEAD + SHORT) -> Sequence:
    """A conversation whose next prompt begins with these ids."""
    seq = bench.add(HEAD + RUN, points=(len(HEAD),))
    bench.run()
    bench.scheduler.keep(seq, seq.num_tokens, following(next_ids))
    bench.run()
    return seq


def begun(rule: ResumeRule, num_steps: int) -> Bench:
    """A conversation whose next prompt is computed ahead, since so many steps."""
    bench = Bench(rule)
    answered(bench)
    bench.scheduler.look_ahead()
    for _ in range(num_steps):
        bench.step()
    return bench


def tokens(bench: Bench) -> tuple[int, ...]:
    return tuple(bench.scheduler.ahead.tokens.values())


@RULES
def test_the_next_prompt_resumes_behind_what_was_computed_ahead(rule: ResumeRule) -> None:
    bench = Bench(rule)
    answered(bench)
    assert tokens(bench) == (0, 0, 0)
    bench.scheduler.look_ahead()
    bench.run()
    assert tokens(bench) == (len(SHORT), 0, 0) and bench.scheduler.ahead.next is None
    seq = bench.add([*HEAD, *SHORT, *ids(30, 3)])
    bench.run()
    assert seq.num_cached_tokens == len(HEAD + SHORT)
    assert seq.receipt.ahead_tokens == len(SHORT)
    assert tokens(bench) == (len(SHORT), len(SHORT), 0)
    bench.check_replies()


@RULES
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_request_takes_the_next_step_and_loses_nothing(rule: ResumeRule, num_steps: int) -> None:
    bench = begun(rule, num_steps)
    done = tokens(bench)[0]
    other = bench.add(ids(90, 5))
    plan = bench.scheduler.schedule(99.0)
    assert [chunk.seq for chunk in plan.prefill] == [other]
    bench.scheduler.update(bench.runner.decode(plan))
    bench.scheduler.update(bench.runner.prefill(plan.prefill))
    bench.run()
    assert done <= tokens(bench)[0] < len(SHORT)
    bench.scheduler.look_ahead()  # it goes on where it was
    bench.run()
    assert tokens(bench) == (len(SHORT), 0, 0)
    bench.check_replies()


@RULES
def test_its_own_conversation_goes_on_from_what_is_done(rule: ResumeRule) -> None:
    bench = begun(rule, 2)
    seq = bench.add([*HEAD, *SHORT, *ids(30, 3)])
    bench.run()
    computed, used, wasted = tokens(bench)
    assert used == computed == seq.receipt.ahead_tokens > 0 and wasted == 0
    assert seq.num_cached_tokens == len(HEAD) + used
    assert bench.scheduler.ahead.next is None
    bench.check_replies()


def test_it_counts_up_to_where_it_was_computed_also_if_it_has_just_begun_again() -> None:
    bench = begun(SLICEABLE, 2)
    bench.add(ids(90, 5))
    bench.run()
    bench.scheduler.look_ahead()
    seq = bench.add([*HEAD, *SHORT, *ids(30, 3)])
    bench.run()
    assert tokens(bench)[1] == tokens(bench)[0] == seq.receipt.ahead_tokens > 0


def test_tokens_that_another_request_has_computed_do_not_count() -> None:
    bench = Bench(SLICEABLE)
    bench.add([*HEAD, *SHORT[:300]])
    bench.run()
    answered(bench)
    bench.scheduler.look_ahead()
    bench.run()
    seq = bench.add([*HEAD, *SHORT, *ids(30, 3)])
    bench.run()
    assert tokens(bench) == (100, 100, 0) and seq.num_cached_tokens == len(HEAD + SHORT)


@RULES
@pytest.mark.parametrize("beside", [{"looks_ahead": False}, {"is_alone": False}])
def test_it_gives_way_to_other_models_and_goes_on_later(rule: ResumeRule, beside: dict[str, bool]) -> None:
    bench = begun(rule, 2)
    done = tokens(bench)[0]
    plan = bench.scheduler.schedule(99.0, **beside)
    assert not plan.prefill and bench.scheduler.ahead.running is None
    bench.scheduler.update(bench.runner.decode(plan))
    bench.run()
    assert tokens(bench)[0] > done and bench.scheduler.ahead.next is not None
    bench.scheduler.look_ahead()
    bench.run()
    assert tokens(bench) == (len(SHORT), 0, 0)


def test_it_ends_once_the_features_of_its_image_have_left() -> None:
    """No vision encoder runs for a question that may never come."""
    features = MediaCache[Features](0)
    images = MLLMScheduler(features, max_bytes=1000, bytes_per_token=1, bidirectional=False)
    bench = Bench(SLICEABLE, images=images)
    seq = answered(bench)
    image = MediaItem(b"a", len(HEAD) + 300, 10, {})
    features.store(("", image.digest), Features(10))
    bench.scheduler.keep(seq, seq.num_tokens, replace(following(HEAD + SHORT), media=(image,)))
    bench.scheduler.look_ahead()
    bench.step()
    assert bench.scheduler.ahead.running is not None
    features.clear()
    bench.run()
    assert 0 < tokens(bench)[0] < 300 and bench.scheduler.ahead.next is not None


def test_a_step_that_fails_ends_it_and_tells_no_client() -> None:
    bench = begun(SLICEABLE, 2)
    assert bench.scheduler.recover(GenerationError("It broke.")) == []
    assert tokens(bench)[0] == tokens(bench)[2] > 0 and bench.scheduler.ahead.next is None


def test_it_ends_for_good_where_other_models_leave_too_little_memory() -> None:
    bench = Bench(SLICEABLE)
    answered(bench)
    bench.scheduler.look_ahead()
    bench.scheduler.room.is_shared = True
    bench.scheduler.pool.plan(1000)
    bench.step()
    assert not bench.scheduler.has_work and bench.scheduler.ahead.next is None


def test_the_newest_of_many_conversations_are_remembered() -> None:
    bench = Bench(SLICEABLE)
    for number in range(20):
        seq = bench.add(HEAD + RUN)
        seq.cache_salt = str(number)
        bench.run()
        bench.scheduler.keep(seq, seq.num_tokens, following(HEAD + SHORT))
    salts = []
    while (beginning := bench.scheduler.ahead.next) is not None:
        salts.append(beginning.seq.cache_salt)
        bench.scheduler.ahead.forget(beginning)
    assert salts == [str(number) for number in range(19, 3, -1)]


def test_nothing_is_computed_while_requests_keep_coming() -> None:
    bench = Bench(SLICEABLE)
    answered(bench)
    for number in range(20):
        bench.scheduler.look_ahead()  # too early: the engine asks only at rest
        bench.add(ids(70, number))
        bench.step()
        bench.step()
    assert tokens(bench) == (0, 0, 0)


def test_a_newer_reply_of_the_conversation_replaces_it() -> None:
    bench = Bench(SLICEABLE)
    answered(bench)
    bench.scheduler.look_ahead()
    bench.run()
    answered(bench, HEAD + ids(250, 7))  # the last question was asked again
    assert tokens(bench) == (len(SHORT), 0, len(SHORT))
    bench.scheduler.look_ahead()
    bench.run()
    assert tokens(bench) == (len(SHORT) + 250, 0, len(SHORT)) and bench.scheduler.ahead.next is None


def test_other_salts_have_their_own_and_are_cleared_alone() -> None:
    bench = Bench(SLICEABLE)
    for salt in ("a", "b"):
        seq = bench.add(HEAD + RUN)
        seq.cache_salt = salt
        bench.run()
        bench.scheduler.keep(seq, seq.num_tokens, following(HEAD + SHORT))
    bench.scheduler.ahead.clear("a")
    beginning = bench.scheduler.ahead.next
    assert beginning is not None and beginning.seq.cache_salt == "b"
    bench.scheduler.ahead.forget(beginning)
    assert bench.scheduler.ahead.next is None


@RULES
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_clearing_the_cache_ends_it_without_a_trace(rule: ResumeRule, num_steps: int) -> None:
    bench = begun(rule, num_steps)
    bench.scheduler.ahead.clear("")
    bench.tree.clear(salts="")
    bench.run()
    assert bench.tree.common_length(("model", ""), pack((*HEAD, *SHORT))) == 0
    assert not bench.scheduler.has_work and tokens(bench)[0] == tokens(bench)[2] < len(SHORT)


def test_the_path_that_it_replaces_goes_first() -> None:
    bench = Bench(SLICEABLE)
    old = answered(bench)
    bench.scheduler.look_ahead()
    bench.run()
    other = bench.add(ids(300, 8))
    bench.run()
    bench.tree.shrink_to(bench.tree.used_bytes - 30_000)
    lengths = [bench.tree.common_length(("model", ""), pack(seq.key())) for seq in (old, other)]
    assert lengths[0] < len(HEAD + RUN) - 50 and lengths[1] == other.num_tokens - 1
    assert bench.tree.common_length(("model", ""), pack((*HEAD, *SHORT))) == len(HEAD + SHORT)


def test_it_is_not_worth_state_that_saves_more() -> None:
    tree = tree_of(max_bytes=1_000_000)
    tree.add_model("slow", ResumeRule(), s_per_token=1.0)
    put(tree, range(500), space=("slow", ""), now=0.0)
    used = tree.used_bytes
    room = tree.max_bytes - used
    for num_bytes, is_worth in ((room, True), (room + 1, False)):
        assert tree.is_worth("model", num_bytes, num_tokens=100, kept_bytes=30_000) == is_worth
    assert tree.is_worth("slow", room + 1, num_tokens=400, kept_bytes=30_000)
    assert tree.used_bytes == used and resumed(tree, range(500), space=("slow", ""))[1] == 499


def test_what_is_not_worth_its_memory_is_forgotten() -> None:
    bench = Bench(SLICEABLE)
    answered(bench)
    bench.tree.set_limit(bench.tree.used_bytes)
    bench.scheduler.pool.num_bytes = 10_000
    bench.scheduler.look_ahead()
    assert not bench.scheduler.has_work and bench.scheduler.ahead.next is None


CASES = [("M4 Max", "Qwen3 8B"), ("M1 Max", "Qwen3 32B"), ("M4 Pro", "Qwen3.8 27B"), ("M2 Max", "gpt-oss 120B")]


@pytest.mark.parametrize(("chip", "shape"), CASES)
def test_a_first_token_comes_at_most_a_chunk_later(chip: str, shape: str) -> None:
    """Of a question that comes at any moment of it."""
    device = Device(CHIPS[chip], SHAPES[shape])

    def first_token_s(num_steps: int) -> tuple[float, float]:
        serving = Serving(device, with_cache=True)
        seq, longest_s = serving.send(1, 0, 6_000, 8), 0.0
        while serving.scheduler.has_work:
            serving.step()
        serving.scheduler.keep(seq, seq.num_tokens, following([*serving.text(1, 0, 2_000), *serving.text(3, 0, 3_000)]))
        while serving.scheduler.has_work:
            serving.step()
        serving.scheduler.look_ahead()
        for _ in range(num_steps):
            before = serving.runner.now_s
            serving.step()
            longest_s = max(longest_s, serving.runner.now_s - before)
        sent_s = serving.runner.now_s
        other = serving.send(2, 0, 500, 4)
        while not serving.heard[other.seq_id].times:
            serving.step()
        return serving.heard[other.seq_id].times[0] - sent_s, longest_s

    plain_s, _ = first_token_s(0)
    for num_steps in (1, 2, 7, 20):
        first_s, chunk_s = first_token_s(num_steps)
        assert chunk_s <= max(1.2 * MAX_CHUNK_S, 1.2 * device.chunk_s(64))
        assert first_s <= plain_s + max(MAX_CHUNK_S, device.chunk_s(64))


def computed_at_question(device: Device, lengths: tuple[int, ...], pause_s: float | None) -> tuple[int, float]:
    """Tokens that the question after an agent's run computes, and seconds to its first token. None: nothing ahead."""
    serving = Serving(device, with_cache=True)

    def rest() -> None:
        while serving.scheduler.has_work:
            serving.step()

    for number, length in enumerate(lengths):
        seq = serving.send(1, number, length, REPLY_TOKENS)
        rest()
    rewritten = [*serving.text(1, 0, lengths[0]), *serving.text(2, 0, (lengths[-1] - lengths[0]) * 4 // 5)]
    serving.scheduler.keep(seq, seq.num_tokens, None if pause_s is None else following(rewritten))
    rest()
    end_s = serving.runner.now_s + (pause_s or 0)
    if pause_s:
        serving.scheduler.look_ahead()
    while serving.scheduler.has_work and serving.runner.now_s < end_s:
        serving.step()
    sent_s = serving.runner.now_s
    seq = serving.send(1, len(lengths), 0, 4, [*rewritten, *serving.text(3, 0, 100)])
    rest()
    return seq.num_prompt_tokens - seq.num_cached_tokens, serving.heard[seq.seq_id].times[0] - sent_s


@pytest.mark.parametrize("session", cases(SESSIONS, ["Claude Code, short", "Codex"]))
def test_a_recorded_run_is_read_in_the_pause_before_the_question(session: str) -> None:
    device, lengths = Device(CHIPS["M4 Max"], SHAPES["Qwen3 8B"]), SESSIONS[session]
    (plain, plain_s), (none, none_s), (some, _), (ahead, ahead_s) = (
        computed_at_question(device, lengths, pause_s) for pause_s in (None, 0, 2, 60)
    )
    assert (none, none_s) == (plain, plain_s)
    assert ahead <= 101 and ahead <= some < plain
    assert ahead_s < plain_s
