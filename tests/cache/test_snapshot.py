"""Copies of a row's state: complete, detached, and put together again exactly."""

from dataclasses import replace
from itertools import combinations_with_replacement

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from tests.support.checkpoints import OWN_STATE
from tests.support.rows import cases, row
from vllm_mlx.cache import layers, snapshot
from vllm_mlx.cache.footprint import footprint
from vllm_mlx.cache.node import Piece, ResumeRule
from vllm_mlx.cache.snapshot import Stack, overlapping
from vllm_mlx.core.memory import allocated_slots

TOKENS = [(7 * i) % 500 for i in range(90)]


@pytest.fixture(
    scope="module",
    params=cases(
        ["qwen3", "qwen3_5", "gemma3_text", "falcon_h1", "gpt_oss", *OWN_STATE], ["qwen3_5", "gemma3_text", *OWN_STATE]
    ),
)
def model(request, checkpoint):
    return load_model(checkpoint(request.param))[0]


def whole_bytes(caches):
    return layers.state_bytes(layers.copied_whole(caches))


def run(model, caches, tokens):
    logits = model(mx.array([tokens]), cache=caches)
    mx.eval(logits, layers.state_arrays(caches))
    return logits[0, -1]


def filled(model, tokens):
    caches = make_prompt_cache(model)
    run(model, caches, tokens)
    return caches


def rule(model) -> ResumeRule:
    found = snapshot.resume_rule(filled(model, TOKENS[:2]))
    assert found is not None
    return found


def take(model, caches, start, end, row=0):
    kv, states = layers.split(caches)
    return snapshot.capture(snapshot.view(kv, row, states, row, end), start, end, rule(model).window)


def batched(rows, lengths):
    """One cache per layer, in which all rows share batch caches."""
    parts = [layers.split(row) for row in rows]
    kv = layers.merge([(kv, [length]) for (kv, _), length in zip(parts, lengths, strict=True)])
    return layers.assemble(rows[0], kv, layers.gather([(states, 0, 1) for _, states in parts]))


def pieces(*captured):
    start, result = 0, []
    for segment, window_start, _ in captured:
        end = start + segment.length
        result.append(Piece(segment=segment, start=start, end=end, window_start=window_start, take=segment.length))
        start = end
    return result


def continued(model, parts, state, length):
    caches = make_prompt_cache(model)
    snapshot.restore(caches, parts, state, length=length, capacity=length + 20)
    return run(model, caches, TOKENS[length : length + 5])


@row("S4-11")
def test_a_restored_row_goes_on_like_the_one_that_was_copied(model):
    caches = filled(model, TOKENS[:60])
    copy = take(model, caches, 0, 60)
    expected = run(model, caches, TOKENS[60:65])
    assert mx.allclose(continued(model, pieces(copy), copy[2], 60), expected, atol=1e-4)


def test_state_copied_in_parts_is_the_same(model):
    caches = make_prompt_cache(model)
    parts = []
    for start, end in ((0, 13), (13, 50), (50, 60)):
        run(model, caches, TOKENS[start:end])
        parts.append(take(model, caches, start, end))
    expected = run(model, caches, TOKENS[60:65])
    assert mx.allclose(continued(model, pieces(*parts), parts[-1][2], 60), expected, atol=1e-4)


@row("S4-29")
def test_a_copy_does_not_change_when_its_row_goes_on(model):
    caches = filled(model, TOKENS[:40])
    copy = take(model, caches, 0, 40)
    before = [mx.array(buffer) for buffer in copy[0].buffers()]
    mx.eval(before)
    for token in TOKENS[40:50]:
        run(model, caches, [token])
    after = copy[0].buffers()
    assert all(mx.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_row_is_copied_out_of_a_batch(model):
    if not layers.can_batch(filled(model, TOKENS[:2])):
        pytest.skip("its rows share no batch")
    lengths = (20, 33, 48)
    rows = [filled(model, TOKENS[:length]) for length in lengths]
    alone = [take(model, row, 0, length) for row, length in zip(rows, lengths, strict=True)]
    batch = batched(rows, lengths)
    for index, length in enumerate(lengths):
        copy = take(model, batch, 0, length, index)
        assert copy[0].nbytes == alone[index][0].nbytes
        expected = run(model, filled(model, TOKENS[:length]), TOKENS[length : length + 5])
        assert mx.allclose(continued(model, pieces(copy), copy[2], length), expected, atol=1e-4)


def test_split_parts_own_their_bytes_and_join_to_the_whole(model):
    copy = take(model, filled(model, TOKENS[:60]), 0, 60)
    segment, window_start, state = copy
    for at in (1, 25, 59):
        left, right = segment.split(at)
        assert (left.length, right.length) == (at, 60 - at)
        assert left.nbytes + right.nbytes == segment.nbytes
        parts = pieces((left, min(window_start, at), None), (right, max(window_start, at), None))
        expected = continued(model, pieces(copy), state, 60)
        assert mx.allclose(continued(model, parts, state, 60), expected, atol=1e-5)


@row("S4-3")
def test_bytes_are_what_the_footprint_says(model):
    caches = filled(model, TOKENS[:60])
    segment, _, state = take(model, caches, 0, 60)
    held = segment.nbytes + (0 if state is None else state.nbytes)
    whole_sizes = {length: whole_bytes(filled(model, TOKENS[:1] * length)) for length in (256, 512)}
    said = footprint(caches, whole_sizes)
    assert said.copy_bytes(60) - allocated_slots(60) * said.whole_bytes_per_token <= held <= said.copy_bytes(60)
    assert said.whole_bytes_per_token or held == said.copy_bytes(60)


@row("S4-3")
def test_sizes_are_known_before_anything_is_computed():
    """A gigabyte that nobody asked for yet."""
    before = mx.get_active_memory()
    lazy = [mx.zeros((1, 4, 1 << 16, 1024), dtype=mx.float32) for _ in range(2)]
    segment = snapshot.KVSegment(1 << 16, (snapshot.Block(1 << 16, Stack.of(lazy)),), Stack.of([]), 0)
    state = snapshot.RecurrentState(Stack.of([mx.zeros((1, 1 << 28)), None]), (2,))
    assert segment.nbytes == 2 * 4 * (1 << 16) * 1024 * 4
    assert state.nbytes == (1 << 28) * 4
    assert mx.get_active_memory() - before < 1 << 20


def unlike_row(leaf, num_heads):
    """One layer with keys and values of unlike widths, so that no array of a copy is joined with another one."""
    shapes = ((1, num_heads, 8192, 64), (1, num_heads, 8192, 32))
    leaf.keys, leaf.values = (mx.random.normal(shape) for shape in shapes)
    leaf.offset = leaf._idx = 8192
    mx.eval(leaf.keys, leaf.values)
    return leaf


@pytest.mark.parametrize("start", [0, 600])
@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("kind", ["attention", "window", "recurrent"])
def test_a_copy_keeps_no_buffer_of_the_row_alive(kind, num_heads, start):
    """Values do not tell: a part that shares the row's buffer is equal to a copy, and keeps all of that in memory."""
    mx.synchronize()
    mx.clear_cache()
    before, end, kv, states, window = mx.get_active_memory(), 1000, [], [], None
    if kind == "attention":
        kv = [unlike_row(KVCache(), num_heads)]
    elif kind == "window":
        kv, window, end = [unlike_row(RotatingKVCache(max_size=8192), num_heads)], 700, 8192
    else:  # a row of a batch of many
        states = [ArraysCache(1)]
        states[0].cache = [mx.random.normal((256, num_heads, 64, 64))]
        mx.eval(states[0].cache)
    row_bytes = mx.get_active_memory() - before
    segment, _, state = snapshot.capture(snapshot.view(kv, 0, states, 3, end), start, end, window)
    kept = segment.nbytes + (0 if state is None else state.nbytes)
    assert mx.get_active_memory() - before >= row_bytes + kept, "a copy of its own"
    kv, states = [], []
    assert mx.get_active_memory() - before <= kept + (1 << 15) < row_bytes


def test_a_restored_row_has_room_to_grow(model):
    copy = take(model, filled(model, TOKENS[:60]), 0, 60)
    caches = make_prompt_cache(model)
    snapshot.restore(caches, pieces(copy), copy[2], length=60, capacity=300)
    assert all(leaf.keys.shape[2] == 512 for leaf in layers.leaves(caches) if type(leaf).__name__ == "KVCache")


def test_parts_that_do_not_fit_together_are_damage(model):
    copy = take(model, filled(model, TOKENS[:60]), 0, 60)
    segment, window_start, state = copy
    half = segment.split(30)[0]
    for parts, kept in (
        (pieces((half, min(window_start, 30), None)), state),
        ([], state),
        (pieces(copy), None if state is not None else snapshot.RecurrentState(Stack.of([None]), (1,))),
        *((pieces(copy), damaged) for damaged in damaged_states(state)),
    ):
        with pytest.raises(snapshot.DamagedSnapshot):
            snapshot.restore(make_prompt_cache(model), parts, kept, length=60, capacity=80)


def damaged_states(state):
    """Copies of the state in which what layers keep beside arrays is missing, cut or of another kind."""
    for fields in () if state is None or not state.fields else state.fields[:1]:
        rest = state.fields[1:]
        counter = next(name for name, value in fields.items() if type(value) is int)
        array = next(name for name, value in fields.items() if isinstance(value, dict))
        less = {name: value for name, value in fields.items() if name != counter}
        for damaged in (None, {}, less, {**fields, counter: "7"}, {**fields, array: {"array": 99}}):
            yield replace(state, fields=(damaged, *rest))
        yield replace(state, fields=rest)


def test_a_long_run_is_held_in_blocks():
    segment, _, _ = snapshot.capture(snapshot.view(long_row(2560), 0, [], 0, 2500), 0, 2500, None)
    assert [block.length for block in segment.blocks] == [1024, 1024, 452]
    left, right = segment.split(1500)
    assert left.blocks[0] is segment.blocks[0]
    assert [block.length for block in right.blocks] == [548, 452]


def test_layers_that_are_alike_share_a_buffer(model):
    caches = filled(model, TOKENS[:60])
    segment, _, state = take(model, caches, 0, 60)
    kinds = [layers.kind(leaf) for leaf in layers.leaves(caches)]
    assert segment.num_buffers <= len(set(kinds) - {layers.Kind.RECURRENT, layers.Kind.OTHER})
    assert state is None or state.num_buffers <= (4 if state.fields else 3), "convolution and recurrence, and no more"


def test_arrays_of_different_shapes_come_back_as_they_were():
    arrays = [mx.full((1, 2, 5, width), 10 * width + n) for n, width in enumerate((3, 4, 3, 4, 3))]
    arrays.insert(2, None)
    stack = Stack.of(arrays)
    assert len(stack.buffers) == 2 and len(stack) == 6
    for index, array in enumerate(arrays):
        found = stack[index]
        assert found is None if array is None else mx.array_equal(found, array)


@row("S4-4")
@pytest.mark.parametrize("slice_bytes", [1, 10_000, 1 << 30])
def test_no_evaluation_copies_much_more_than_a_slice(monkeypatch, slice_bytes):
    caches = long_row(2560, num_layers=4)
    row = snapshot.view(caches, 0, [], 0, 2500)
    monkeypatch.setattr(layers, "SLICE_BYTES", slice_bytes)
    copied = []
    real = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: (copied.append(size_of(arrays)), real(*arrays))[1])
    copy = snapshot.capture(row, 0, 2500, None)
    block_bytes = max(block.kv.nbytes for block in copy[0].blocks)
    assert max(copied) < slice_bytes + block_bytes and sum(copied) == copy[0].nbytes
    copied.clear()
    restored = [KVCache() for _ in caches]
    snapshot.restore(restored, pieces(copy), copy[2], length=2500, capacity=2500)
    assert max(copied) < slice_bytes + max(layers.state_bytes([leaf]) for leaf in restored)
    assert sum(copied) == layers.state_bytes(restored)


def size_of(arrays):
    return sum(array.nbytes for array in layers.arrays(list(arrays)))


@pytest.mark.parametrize("lengths", [(600, 600), (600, 600, 600), (600, 200, 400)])
def test_a_join_takes_copies_of_a_slice_and_its_padding(lengths, monkeypatch):
    monkeypatch.setattr(layers, "SLICE_BYTES", 1)  # a layer
    rows = [long_row(length) for length in lengths]
    alone = sum(layers.state_bytes(row) for row in rows)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    batch = layers.merge([(rows[0], lengths[:1]), (rows[1], lengths[1:2])])
    if rows[2:]:
        batch = layers.merge([(batch, lengths[:2]), (rows[2], lengths[2:])])
    padding = layers.state_bytes(batch) - alone
    layer = layers.state_bytes(batch[:1])
    assert mx.get_peak_memory() - before <= padding + 1.5 * layer
    assert all(leaf is None for row in rows for leaf in row), "the rows are emptied"


def test_rows_join_and_leave_with_one_evaluation(monkeypatch):
    lengths = (600, 200, 400)
    rows = [long_row(length) for length in lengths]
    num_evaluations = 0
    real = mx.eval

    def counting(*arrays):
        nonlocal num_evaluations
        num_evaluations += 1
        real(*arrays)

    monkeypatch.setattr(mx, "eval", counting)
    batch = layers.merge([(kv, [length]) for kv, length in zip(rows, lengths, strict=True)])
    assert num_evaluations == 1
    layers.keep(batch, [1, 2], [200, 400])
    assert num_evaluations == 2
    layers.extract(batch, 0, 200)
    assert num_evaluations == 3


def long_row(length, num_layers=12):
    """A row of many layers, so that one of them is a small part."""
    caches = []
    for _ in range(num_layers):
        cache = KVCache()
        cache.keys, cache.values = (mx.random.normal((1, 4, length, 64)) for _ in range(2))
        cache.offset = length
        mx.eval(cache.keys, cache.values)
        caches.append(cache)
    return caches


def test_every_range_of_successive_runs_is_found_once() -> None:
    lengths = (3, 1, 4)
    at = [(place, token) for place, length in enumerate(lengths) for token in range(length)]
    for start, end in combinations_with_replacement(range(len(at) + 1), 2):
        found = [(place, token) for place, span in overlapping(lengths, start, end) for token in range(*span)]
        assert found == at[start:end]
