"""Memory of attention that no short measurement shows: what is kept, what is forced, and the reckoning by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from vllm_mlx.cache.footprint import footprint
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.memory import SHORTEST_CHUNK, AttentionCost, most_slots
from vllm_mlx.engine.sizing import load_measured
from vllm_mlx.runner import attention
from vllm_mlx.runner.attention import AttentionShape, memory_saving, observed, score_bytes
from vllm_mlx.runner.calibrate import calibrate
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import load_model

GB = 1e9
LENGTHS = (8_192, 32_768, 131_072)


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a published model, in half precision."""

    attention: int
    kv_heads: int
    heads: int
    width: int
    windows: int = 0  # sliding-window layers
    window: int = 0
    states: tuple[tuple[int, ...], ...] = ()  # shapes of one recurrent layer's state
    recurrent: int = 0

    def caches(self) -> list[Any]:
        """Cache objects as after a first token, with arrays that nobody evaluates."""
        found: list[Any] = [KVCache() for _ in range(self.attention)]
        found += [RotatingKVCache(max_size=self.window) for _ in range(self.windows)]
        for cache in found:
            cache.keys = cache.values = mx.zeros((1, self.kv_heads, 256, self.width), mx.bfloat16)
            cache.offset = 1
        for _ in range(self.recurrent):
            state = ArraysCache(len(self.states))
            state.cache = [mx.zeros(shape, mx.float32) for shape in self.states]
            found.append(state)
        return found

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.heads, self.width, self.width, 2)


MODELS = {
    "Qwen3.5-27B": Layers(
        attention=16, kv_heads=4, heads=24, width=256, recurrent=48, states=((1, 3, 10240), (1, 48, 128, 128))
    ),
    "gemma3-27B": Layers(attention=10, kv_heads=16, heads=32, width=128, windows=52, window=1024),
    "gpt-oss-120b": Layers(attention=18, kv_heads=8, heads=64, width=64, windows=18, window=128),
    "Qwen3-30B-A3B": Layers(attention=48, kv_heads=4, heads=32, width=128),
}
# Bytes of a row, by hand: 2 (keys and values) · 2 (bytes) · layers · heads · width · tokens, plus windows and states.
ROWS_GB = {
    "Qwen3.5-27B": (0.70, 2.31, 8.75),
    "gemma3-27B": (1.11, 3.12, 11.18),
    "gpt-oss-120b": (0.31, 1.21, 4.84),
    "Qwen3-30B-A3B": (0.81, 3.22, 12.89),
}
# Scores of a chunk of 2,048 tokens, if the device keeps them: 2 (copies) · 2 (bytes) · heads · chunk · context.
SCORES_GB = {
    "Qwen3.5-27B": (1.61, 6.44, 25.77),
    "gemma3-27B": (2.15, 8.59, 34.36),
    "gpt-oss-120b": (4.29, 17.18, 68.72),
    "Qwen3-30B-A3B": (2.15, 8.59, 34.36),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_take_what_arithmetic_says(name: str) -> None:
    row = footprint(MODELS[name].caches())
    found = [row.bytes_at(length) / GB for length in LENGTHS]
    slack = [row.bytes_at(most_slots(length)) / row.bytes_at(length) for length in LENGTHS]
    assert found == pytest.approx(ROWS_GB[name], rel=0.035), f"with slots for growth, at most {max(slack):.3f} times"


@pytest.mark.parametrize("name", MODELS)
def test_the_largest_layer_of_long_rows_fits_in_what_stays_free_for_joins(name: str) -> None:
    one, row = MODELS[name], footprint(MODELS[name].caches())
    rows_bytes = 8 * row.bytes_at(131_072)
    largest = 8 * 131_072 * row.bytes_per_token // one.attention
    assert row.layer_bytes(rows_bytes + largest) >= largest * 0.99
    assert row.layer_bytes(rows_bytes + largest) <= largest * 1.1


def test_a_layer_of_several_caches_is_copied_as_one() -> None:
    """DeepSeek V3.2 keeps an index of each layer's tokens beside their state."""
    caches = [CacheList(*Layers(attention=2, kv_heads=1, heads=8, width=64).caches()) for _ in range(5)]
    assert footprint(caches).num_layers == 5


@pytest.mark.parametrize("name", MODELS)
def test_scores_take_what_arithmetic_says(name: str) -> None:
    per_pair = MODELS[name].shape.score_bytes
    assert [per_pair * 2048 * length / GB for length in LENGTHS] == pytest.approx(SCORES_GB[name], rel=0.005)
    assert score_bytes(frozenset({MODELS[name].shape}), on_metal=False) == per_pair
    assert score_bytes(frozenset({MODELS[name].shape}), on_metal=True) == 0, "Metal has a kernel for its width"
    assert MODELS[name].shape.needs_forcing == (name == "Qwen3.5-27B")


@pytest.mark.parametrize(
    ("shape", "has_kernel", "needs_forcing"),
    [
        (AttentionShape(8, 128, 128, 2), True, False),
        (AttentionShape(8, 256, 256, 2), True, True),
        (AttentionShape(8, 192, 192, 2), True, True),
        (AttentionShape(8, 192, 128, 2), False, False),  # latent attention while it prefills
        (AttentionShape(8, 512, 512, 2), False, False),  # global layers of gemma4
        (AttentionShape(8, 112, 112, 2), False, False),
        (AttentionShape(8, 128, 128, 4), True, False),
        (AttentionShape(8, 192, 192, 4), False, False),  # 40 KB of a threadgroup's 32 KB
        (AttentionShape(8, 256, 256, 4), False, False),  # 54 KB
    ],
)
def test_metal_has_kernels_for_some_widths(shape: AttentionShape, has_kernel: bool, needs_forcing: bool) -> None:
    assert (shape.has_fused_kernel, shape.needs_forcing) == (has_kernel, needs_forcing)


@pytest.mark.parametrize("start", [0, 1, 63, 5_000, 130_000])
@pytest.mark.parametrize("room", [10_000, 1 << 20, 1 << 28])
def test_the_longest_chunk_is_the_longest_that_fits(start: int, room: int) -> None:
    cost = AttentionCost(bytes_per_pair=96, room_bytes=room)
    longest = cost.longest_chunk(start)
    assert longest == 1 or 96 * longest * (start + longest) <= room
    assert 96 * (longest + 1) * (start + longest + 1) > room


@pytest.mark.parametrize("room", [1 << 28, 1 << 30, 1 << 40])
def test_there_is_always_room_for_a_short_chunk_at_the_end_of_the_context(room: int) -> None:
    cost = AttentionCost.within(room, bytes_per_pair=96, max_chunk=2048, max_tokens=131_072)
    assert SHORTEST_CHUNK <= cost.longest_chunk(131_072 - SHORTEST_CHUNK) <= 2048
    assert cost.room_bytes <= max(room, 96 * SHORTEST_CHUNK * 131_072)


def test_without_scores_chunks_have_no_limit() -> None:
    assert (
        AttentionCost.within(1 << 30, bytes_per_pair=0, max_chunk=2048, max_tokens=4096).longest_chunk(4000) > 1 << 30
    )


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every attention call."""
    calls: list[dict[str, Any]] = []

    def recording(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        calls.append(options)
        return queries

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recording)
    return calls


@pytest.mark.parametrize(
    ("width", "num_queries", "num_keys", "dtype", "is_forced"),
    [
        (256, 512, 4096, mx.bfloat16, True),
        (256, 512, 4096, mx.float32, False),
        (256, 512, 512, mx.bfloat16, False),
        (256, 4096, 4095, mx.bfloat16, False),  # a causal mask with more queries than keys has no such kernel
        (256, 8, 1 << 20, mx.bfloat16, False),
        (128, 512, 4096, mx.bfloat16, False),
    ],
)
def test_the_kernel_is_forced_only_where_scores_are_large(
    monkeypatch: pytest.MonkeyPatch,
    recorded: list[dict[str, Any]],
    width: int,
    num_queries: int,
    num_keys: int,
    dtype: mx.Dtype,
    is_forced: bool,
) -> None:
    before = mx.fast.scaled_dot_product_attention
    queries, keys = (mx.zeros((1, 4, n, width), dtype) for n in (num_queries, num_keys))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with memory_saving(frozenset({AttentionShape(4, 256, 256, 2)}), 16 * 512 * 1024):
        mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=1.0, mask="causal")
    assert recorded == [{"scale": 1.0, "mask": "causal"} | ({"force_fused": True} if is_forced else {})]
    assert mx.fast.scaled_dot_product_attention is before


def test_a_mask_of_each_head_is_counted_though_the_kernel_keeps_no_scores() -> None:
    """Latent attention adds the scores of positions as a mask, which the model itself keeps in memory."""
    queries, keys = (mx.zeros((1, 4, n, 128), mx.bfloat16) for n in (16, 64))
    with observed() as shapes:
        mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=1.0, mask=mx.zeros((1, 1, 16, 64), mx.bool_))
    assert score_bytes(frozenset(shapes), on_metal=True) == 0
    with observed() as shapes:
        mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=1.0, mask=mx.zeros((1, 4, 16, 64), mx.bfloat16))
    assert score_bytes(frozenset(shapes), on_metal=True) == 2 * 4 * 2
    assert score_bytes(frozenset(shapes), on_metal=False) == 3 * 4 * 2


def test_the_function_comes_back_after_an_error() -> None:
    before = mx.fast.scaled_dot_product_attention
    with pytest.raises(ValueError, match="rank"), observed():
        mx.fast.scaled_dot_product_attention(mx.zeros((1, 2)), mx.zeros((1, 2)), mx.zeros((1, 2)), scale=1.0)
    assert mx.fast.scaled_dot_product_attention is before


@pytest.mark.skipif(mx.metal.is_available(), reason="a GPU takes the flag")
def test_nothing_is_forced_without_metal(recorded: list[dict[str, Any]]) -> None:
    queries = mx.zeros((1, 4, 64, 256), mx.bfloat16)
    with memory_saving(frozenset({AttentionShape(4, 256, 256, 2)}), 0):
        mx.fast.scaled_dot_product_attention(queries, queries, queries, scale=1.0)
    assert recorded == [{"scale": 1.0}]


def test_the_cpu_has_no_such_kernel() -> None:
    """The reason for the guard."""
    queries = mx.zeros((1, 4, 64, 256), mx.bfloat16)
    if not mx.metal.is_available():
        with pytest.raises(ValueError, match="force_fused"):
            mx.eval(mx.fast.scaled_dot_product_attention(queries, queries, queries, scale=1.0, force_fused=True))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gemma3_text", "gpt_oss", "falcon_h1", "jamba"])
def test_the_shapes_of_a_model_are_observed_at_load(checkpoint: Callable[..., Path], name: str) -> None:
    found = find_checkpoint(str(checkpoint(name)))
    shapes = calibrate(load_model(found, trust_remote_code=False)).attention
    config = found.config.get("text_config", found.config)
    assert {shape.num_heads for shape in shapes} == {config["num_attention_heads"]}
    assert {shape.item_bytes for shape in shapes} == {4}
    if "head_dim" in config:
        assert {shape.key_width for shape in shapes} == {config["head_dim"]}


def test_a_model_that_computes_attention_itself_keeps_scores(checkpoint: Callable[..., Path]) -> None:
    found = find_checkpoint(str(checkpoint("gemma2")))
    measured = load_measured(EngineConfig(model=str(found.path), memory_budget_bytes=1 << 30), found)
    assert score_bytes(measured.calibration.attention, on_metal=True) == 2 * 4 * found.config["num_attention_heads"]


@pytest.mark.parametrize(("name", "has_experts"), [("qwen3_moe", True), ("qwen3", False)])
def test_a_mixture_of_experts_is_measured_with_a_long_chunk_too(
    checkpoint: Callable[[str], Path], name: str, has_experts: bool
) -> None:
    config = EngineConfig(model=str(checkpoint(name)))
    calibration = load_measured(config, find_checkpoint(config.model)).calibration
    assert (calibration.long_probe_s is not None) == has_experts


@pytest.mark.parametrize("forces", [True, False])
def test_one_setting_turns_forcing_off(
    monkeypatch: pytest.MonkeyPatch, recorded: list[dict[str, Any]], forces: bool
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(attention, "FORCES", forces)
    queries = mx.zeros((1, 4, 64, 256), mx.bfloat16)
    with memory_saving(frozenset({AttentionShape(4, 256, 256, 2)}), 0):
        mx.fast.scaled_dot_product_attention(queries, queries, queries, scale=1.0)
    assert recorded == [{"scale": 1.0} | ({"force_fused": True} if forces else {})]
