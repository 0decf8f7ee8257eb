"""A reply from cached state equals one from nothing, on every architecture and for every way of resuming."""

from dataclasses import replace

import mlx.core as mx
import pytest

from tests.support.checkpoints import ARCHITECTURES, OWN_STATE
from tests.support.engine_driver import Driver, RandomPrompts, plain_loop
from tests.support.rows import cases, row
from vllm_mlx.cache import snapshot
from vllm_mlx.cache.snapshot import Stack
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs

NUM_TOKENS = 6
STATEFUL = {"qwen3_next", "qwen3_5", "vision:qwen3_5", "nemotron_h", "falcon_h1", "granitemoehybrid", "jamba",
            "deepseek_v41"}  # fmt: skip
WINDOWED = {"gemma3_text", "gpt_oss", "llama4"}
NAMES = (*ARCHITECTURES, *OWN_STATE, "vision:qwen3_5")
prompt = RandomPrompts(4)


@pytest.fixture(scope="module", params=cases(NAMES, {"gemma3_text", "qwen3_5"}))
def model(request, checkpoint):
    return request.param, checkpoint(request.param)


@pytest.fixture
def driver(model):
    return Driver(model[1])


def run(driver: Driver, ids: list[int], points=(), **fields) -> tuple[list[int], int]:
    """The reply, and how much of the prompt was not computed."""
    seq_id = driver.add(ids, NUM_TOKENS, points=points, **fields)
    driver.run()
    return driver.replies[seq_id].token_ids, driver.seqs[seq_id].num_cached_tokens


def check(driver: Driver, path, ids: list[int], **fields) -> int:
    """Tokens taken from the cache, the reply being the plain loop's."""
    reply, num_cached = run(driver, ids, **fields)
    assert reply == plain_loop(path, ids, NUM_TOKENS)[0]
    return num_cached


@row("S1-13", "S4-18", "S4-20")
def test_an_identical_prompt_computes_one_token(model, driver):
    ids = prompt(90)
    assert check(driver, model[1], ids) == 0
    assert check(driver, model[1], ids) == 89
    assert check(driver, model[1], ids) == 89


@row("S0-11", "S1-7", "S4-34")
@pytest.mark.parametrize(
    "model", cases(NAMES, {"qwen3", "gemma3_text", "qwen3_5", "llama4"}), indirect=True, scope="module"
)
def test_the_next_turn_computes_only_what_is_new(model, driver):
    ids = prompt(60)
    for _ in range(3):
        reply, _ = run(driver, ids)
        ids = [*ids, *reply, *prompt(8)]
        assert check(driver, model[1], ids) == len(ids) - 9  # the last token of the reply was never fed


@row("S4-12", "S4-27")
def test_a_new_question_resumes_at_the_planned_point(model, driver):
    name, path = model
    system = prompt(80)
    assert check(driver, path, [*system, *prompt(9)], points=(80,)) == 0
    for _ in range(2):
        assert check(driver, path, [*system, *prompt(9)], points=(80,)) >= 80
    assert name


def test_a_prompt_that_leaves_a_stored_one_midway_resumes_before_that(model, driver):
    name, path = model
    ids = prompt(100)
    check(driver, path, ids, points=(40,))
    num_cached = check(driver, path, [*ids[:70], (ids[70] + 1) % 500, *prompt(20)])
    assert num_cached == (40 if name in STATEFUL | WINDOWED else 70)


def test_a_prompt_that_is_the_beginning_of_a_stored_one(model, driver):
    name, path = model
    ids = prompt(100)
    check(driver, path, ids, points=(40,))
    assert check(driver, path, ids[:70]) == (40 if name in STATEFUL | WINDOWED else 69)


@row("S4-24")
def test_a_prompt_that_is_read_in_chunks_is_kept_like_one_that_is_not(model):
    driver, ids = Driver(model[1], max_prefill_chunk=16), prompt(100)
    assert check(driver, model[1], ids) == 0
    assert check(driver, model[1], ids) == 99


@row("S4-6")
def test_a_long_prefill_that_is_aborted_goes_on_from_its_last_copy(model):
    name, path = model
    driver, ids = Driver(path, max_prefill_chunk=16, snapshot_every=32), prompt(200)
    seq_id = driver.add(ids, NUM_TOKENS)
    while driver.seqs[seq_id].num_computed_tokens < 100:
        driver.step()
    held = sorted(entry.end for entry in driver.engine.cache_tree.entries() if entry.state_bytes)
    driver.engine.abort([seq_id])
    assert check(driver, path, ids) >= 96
    assert name not in STATEFUL or [end for end in held if end < 96] == [32, 64]


@row("S4-14")
@pytest.mark.parametrize("when", ["later", "at once"])
def test_an_aborted_prefill_is_not_lost(model, when: str):
    """At once: who asks again comes in the step that takes the copy."""
    name, path = model
    driver = Driver(path, max_prefill_chunk=32, max_stall_ms=20_000)
    ids = prompt(200)
    seq_id = driver.add(ids, NUM_TOKENS)
    driver.step()
    driver.step()
    driver.engine.abort([seq_id])
    if when == "later":
        driver.run()
    assert check(driver, path, ids) == 64, name


def test_rows_that_begin_alike_compute_the_beginning_once(model):
    path = model[1]
    driver = Driver(path, max_prefill_chunk=32)
    shared = prompt(120)
    asked = [[*shared, *prompt(10)] for _ in range(4)]
    seq_ids = [driver.add(ids, NUM_TOKENS) for ids in asked]
    driver.run()
    assert [driver.replies[seq_id].token_ids for seq_id in seq_ids] == [
        plain_loop(path, ids, NUM_TOKENS)[0] for ids in asked
    ]
    assert [driver.seqs[seq_id].num_cached_tokens for seq_id in seq_ids] == [0, 120, 120, 120]


def test_a_follower_leads_when_its_leader_goes(model):
    path = model[1]
    driver = Driver(path, max_prefill_chunk=32)
    shared = prompt(120)
    leader, follower = driver.add([*shared, 1], NUM_TOKENS), driver.add([*shared, 2, 3], NUM_TOKENS)
    driver.step()
    driver.engine.abort([leader])
    driver.run()
    assert driver.replies[follower].token_ids == plain_loop(path, [*shared, 2, 3], NUM_TOKENS)[0]


def test_salts_share_nothing(model, driver):
    ids = prompt(50)
    assert check(driver, model[1], ids, cache_salt="a") == 0
    assert check(driver, model[1], ids, cache_salt="b") == 0
    assert check(driver, model[1], ids, cache_salt="a") == 49


@row("S0-21", "S4-25")
def test_sampling_does_not_matter_to_the_cache(model, driver):
    ids = prompt(50)
    driver.generate([ids], max_tokens=5, sampling=TokenSampling(temperature=1.0, seed=3))
    assert check(driver, model[1], ids) == 49


@row("S4-26")
def test_state_of_several_rows_is_not_stored(model, driver, monkeypatch):
    """A batch dimension other than 1: the reply goes on, nothing is kept, and the next prompt is a miss.

    Layers that are copied whole say nothing about their dimensions; their rows are never batched.
    """
    path, ids = model[1], prompt(80)
    one_row = snapshot.view
    has_known_layers = []

    def of_two_rows(*given) -> snapshot.RowView:
        row = one_row(*given)
        twice = [tuple(mx.concatenate([array, array]) for array in pair) for pair in row.attention]
        states = [tuple(None if a is None else mx.concatenate([a, a]) for a in layer) for layer in row.recurrent]
        has_known_layers.append(bool(twice or states))
        return replace(row, attention=tuple(twice), recurrent=tuple(states))

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "view", of_two_rows)
        assert check(driver, path, ids) == 0
    assert has_known_layers, "something was captured"
    assert any(driver.engine.cache_tree.entries()) is not any(has_known_layers)
    assert check(driver, path, ids) == (0 if any(has_known_layers) else 79)
    assert check(driver, path, ids) == 79


@row("S4-26")
def test_damaged_state_is_dropped_and_the_reply_is_right(model, driver):
    path = model[1]
    ids = prompt(80)
    run(driver, ids)
    tree = driver.engine.cache_tree
    for node in tree.store.nodes():
        node.segment = replace(node.segment, blocks=(), windows=Stack.of([]))
        node.state = None if node.state is None else replace(node.state, widths=())
    assert check(driver, path, ids) == 0
    assert check(driver, path, ids) == 79
    assert driver.engine.num_rows == 0


def test_without_the_cache_nothing_is_kept(model):
    path = model[1]
    driver = Driver(path, prefix_cache=False)
    ids = prompt(50)
    assert check(driver, path, ids) == 0
    assert check(driver, path, ids) == 0


@row("S0-14")
def test_media_keys_keep_pictures_apart():
    from vllm_mlx.core.sequence import MediaItem, Sequence

    def key(digest: bytes) -> tuple[int, ...]:
        inputs = PromptInputs(token_ids=(1, 2, 9, 9, 3), media=(MediaItem(digest, 2, 2, {}),))
        return Sequence(seq_id=0, prompt=inputs, sampling=TokenSampling(), max_tokens=1).key()

    assert key(b"a" * 32) != key(b"b" * 32)
    assert key(b"a" * 32)[:2] == (1, 2)
    assert all(word < 2**63 for word in key(b"\xff" * 32))
