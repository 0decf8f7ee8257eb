"""Rows whose KV lies apart share a forward pass: every architecture's tokens equal those of each row alone.

These are the contract tests of `runner/grouped.py`: an architecture that stops passing what its caches return straight
to attention, or that asks them for something new, fails here by name.
"""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3

from tests.support.checkpoints import ARCHITECTURES, LATENT, OWN_ATTENTION, PARTLY_ROTARY, checkpoint
from tests.support.rows import cases
from tests.support.vision_families import FAMILIES
from vllm_mlx.cache import layers
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.core.step import PrefillChunk, StepPlan
from vllm_mlx.runner import proofs
from vllm_mlx.runner.batch import Batch, regroup
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.device import DeviceWatch
from vllm_mlx.runner.grouped import GroupMasks
from vllm_mlx.runner.load_model import load_model
from vllm_mlx.runner.model import Model
from vllm_mlx.runner.proofs import sharing_fault
from vllm_mlx.runner.runner import Runner

NAMES = [*ARCHITECTURES, *PARTLY_ROTARY, *LATENT, *(f"vision:{family}" for family in FAMILIES)]
LENGTHS = (5, 40, 17, 33)  # shorter and longer than the windows of 24 tokens
NUM_STEPS = 12
FED = ([9], [8, 7, 6, 5], [4, 11], [12, 13, 14, 15, 16, 17])  # tokens of each row in one forward pass
RECURRENT = ("qwen3_next", "qwen3_5", "nemotron_h", "falcon_h1", "granitemoehybrid", "jamba")


def load(name: str) -> Model:
    return load_model(find_checkpoint(str(checkpoint(name))), trust_remote_code=False)


def sequence(row: int, num_tokens: int) -> Sequence:
    ids = tuple((7 * row + 3 * place) % 50 + 5 for place in range(num_tokens + 1))
    return Sequence(
        seq_id=row, prompt=PromptInputs(token_ids=ids), sampling=TokenSampling(temperature=0), max_tokens=99
    )


def started(model: Model, row: int, num_tokens: int) -> Batch:
    """A row that has one token of its prompt left to feed."""
    seq = sequence(row, num_tokens)
    caches = model.new_caches()
    for start in range(0, num_tokens, 16):
        model.prefill(seq, start, min(start + 16, num_tokens), caches)
        layers.leave_window(caches)
        mx.eval(layers.state_arrays(caches))
    seq.num_computed_tokens = num_tokens + 1
    return Batch.of_row(model, seq, caches, num_tokens)


def step(batch: Batch) -> dict[int, int]:
    """The next token of each row."""
    tokens = {read.seq_id: read.token_id for read in batch.launch().read()}
    for seq in batch.seqs:
        seq.output_token_ids.append(tokens[seq.seq_id])
        seq.num_computed_tokens += 1
    return tokens


def places(batches: list[Batch]) -> dict[int, tuple[Batch, int]]:
    return {seq_id: (batch, index) for batch in batches for index, seq_id in enumerate(batch.seq_ids)}


def rearranged(batch: Batch, *groups: set[int]) -> Batch:
    return Batch.gather(regroup(batch.groups, list(groups)), places([batch]))


@pytest.mark.parametrize(
    "name", cases(NAMES, {"gemma3_text", "qwen3_5", "cohere2", "deepseek_v3", "vision:qwen3_5_moe"})
)
def test_rows_in_groups_decode_as_alone_while_groups_merge_and_split(name: str) -> None:
    model = load(name)
    alone = {}
    for row, length in enumerate(LENGTHS):
        batch = started(model, row, length)
        alone[row] = [step(batch)[row] for _ in range(NUM_STEPS)]
    rows = [started(model, row, length) for row, length in enumerate(LENGTHS)]
    batch = Batch.gather([group for row in rows for group in row.groups], places(rows))
    changes = {4: ({0, 2}, {1, 3}), 6: ({0}, {2}, {1, 3}), 8: ({0}, {1, 2, 3}), 10: ({1, 0}, {2}, {3})}
    together: dict[int, list[int]] = {row: [] for row in alone}
    for number in range(NUM_STEPS):
        if number in changes:
            batch = rearranged(batch, *changes[number])
        for row, token in step(batch).items():
            together[row].append(token)
    assert together == alone


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_each_architecture_share_a_forward_pass(name: str) -> None:
    assert sharing_fault(load(name)) is None


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_model_that_computes_attention_itself_is_found_out(name: str) -> None:
    fault = sharing_fault(load(name))
    assert fault is not None and "attention" in fault


def test_a_model_that_changes_masks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one row, which have no mask, do not show it."""
    model, attend = load("qwen3"), qwen3.scaled_dot_product_attention

    def cutting(*inputs: Any, mask: Any, **options: Any) -> Any:
        return attend(*inputs, mask=mask if mask is None or mask == "causal" else mask[..., :99], **options)

    monkeypatch.setattr(qwen3, "scaled_dot_product_attention", cutting)
    fault = sharing_fault(model)
    assert fault is not None and "attention" in fault


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "qwen3_5", "glm4_moe_lite"])
def test_rows_that_choose_other_experts_alone_share_a_forward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, too, three rows in groups equal three merged ones, however much one row alone differs."""
    monkeypatch.setattr(proofs, "SAME_LOGITS", 2.0)
    model = load(name)
    if name.startswith("qwen3"):  # MLX's CPU backend has experts in float32 only
        model.module.set_dtype(mx.bfloat16)
    assert sharing_fault(model) is None


def test_a_model_that_ignores_masks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows in groups equal merged ones that are wrong, too, but for those that are a group each."""
    model, attend = load("qwen3"), qwen3.scaled_dot_product_attention

    def ignoring(queries: Any, *inputs: Any, mask: Any, **options: Any) -> Any:
        if isinstance(mask, GroupMasks):
            mask = GroupMasks(tuple(None if isinstance(own, mx.array) else own for own in mask.masks))
        return attend(queries, *inputs, mask=None if isinstance(mask, mx.array) else mask, **options)

    monkeypatch.setattr(qwen3, "scaled_dot_product_attention", ignoring)
    fault = sharing_fault(model)
    assert fault is not None and "differ" in fault


def test_rows_join_and_leave_with_copies_of_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "SLICE_BYTES", 1)  # a layer
    model = load("qwen3")
    runner = Runner(model, DeviceWatch(limit_bytes=1))
    seqs = [sequence(row, 1500) for row in (0, 1)]
    runner.prefill([PrefillChunk(seq, 0, 1500) for seq in seqs])
    a, b = seqs
    a.num_computed_tokens = b.num_computed_tokens = 1501
    runner.decode(StepPlan(decode=((a,), (b,))))
    for plan in (StepPlan(decode=((a, b),)), StepPlan(decode=((b,),))):
        for seq in seqs:
            seq.num_computed_tokens += 1
        mx.synchronize()
        before = mx.get_active_memory()
        peak = 1 + runner.decode(plan).overrun.peak_bytes
        assert peak - before < 1.6 * runner.live_bytes() / len(model.structure)


def test_most_rows_of_a_group_that_divides_stay_in_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [started(load("qwen3"), row, length) for row, length in enumerate(LENGTHS)]
    together = regroup([group for row in rows for group in row.groups], [{0, 1, 2, 3}])
    taken, extract = [], layers.extract
    monkeypatch.setattr(layers, "extract", lambda *inputs: taken.append(inputs[-1]) or extract(*inputs))
    divided = regroup(together, [{1}, {0, 2, 3}])
    assert taken == [LENGTHS[1]]
    assert [group.seq_ids for group in divided] == [[1], [0, 2, 3]]


def test_a_row_joins_and_leaves_without_a_copy_of_its_kv() -> None:
    model = load("qwen3")
    rows = [started(model, row, length) for row, length in enumerate(LENGTHS)]
    before = [leaf for row in rows for leaf in row.leaves]
    held = [(leaf, leaf.keys) for leaf in before]
    batch = Batch.gather([group for row in rows for group in row.groups], places(rows))
    assert batch.leaves == before and all(leaf.keys is keys for leaf, keys in held)
    step(batch)
    held = [(leaf, leaf.keys) for leaf in batch.leaves]
    batch = rearranged(batch, {0}, {1}, {3})
    assert len(batch.leaves) == 3 * len(rows[0].leaves)
    assert all(leaf.keys is keys for leaf, keys in held if leaf in batch.leaves)


@pytest.mark.parametrize(
    "name",
    cases(
        [name for name in NAMES if not any(family in name for family in RECURRENT)],
        ["qwen3", "gemma3_text", "gpt_oss", "cohere2", "deepseek_v3", "vision:gemma4", "vision:qwen2_vl"],
    ),
)
def test_rows_take_several_tokens_each_and_not_equally_many(name: str) -> None:
    model = load(name)
    alone = {}
    for row, length in enumerate(LENGTHS):
        batch = started(model, row, length)
        alone[row] = [batch.feed(mx.array([token]), [1])[0] for token in FED[row]]
    rows = [started(model, row, length) for row, length in enumerate(LENGTHS)]
    batch = Batch.gather([group for row in rows for group in row.groups], places(rows))
    tokens = [token for row in range(len(LENGTHS)) for token in FED[row]]
    logits = batch.feed(mx.array(tokens), [len(FED[row]) for row in range(len(LENGTHS))])
    expected = mx.stack([logit for row in range(len(LENGTHS)) for logit in alone[row]])
    assert mx.allclose(logits, expected, atol=1e-4)
    assert [group.lengths for group in batch.groups] == [[n + len(FED[row])] for row, n in enumerate(LENGTHS)]


def test_a_row_of_a_hybrid_model_takes_one_token() -> None:
    batch = started(load("qwen3_5"), 0, 5)
    with pytest.raises(ValueError, match="one token"):
        batch.feed(mx.array([1, 2]), [2])


READS = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__")
READING = ("qwen3_5", "qwen3_vl", "qwen3_vl_moe")  # their layers in mlx-vlm read lengths, unless a cache counts them


@pytest.mark.parametrize("name", [f"vision:{name}" for name in FAMILIES if name in READING])
def test_a_step_reads_nothing_from_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = load(name), []
    for read in READS:
        plain = getattr(mx.array, read, None)
        if plain is not None:
            monkeypatch.setattr(mx.array, read, lambda *inputs, plain=plain: reads.append(1) or plain(*inputs))
    monkeypatch.setattr(mx, "eval", lambda *arrays, plain=mx.eval: reads.append(1) or plain(*arrays))
    for num_rows in (1, 2, 5):
        rows = [started(model, row, LENGTHS[row % 4]) for row in range(num_rows)]
        batch = Batch.gather([group for row in rows for group in row.groups], places(rows))
        apart = [{row} for row in range(num_rows)]
        pairs = [{row, row + 1} & set(range(num_rows)) for row in range(0, num_rows, 2)]
        for groups in (apart, pairs, [set(range(num_rows))]):
            batch = rearranged(batch, *groups)
            for _ in range(2):
                reads.clear()
                logits = batch.forward()
                assert not reads, f"{num_rows} rows in {len(groups)} groups"
                mx.eval(logits)
