"""Experts whose gate and up weights are one array: the same logits as mlx-lm's own model, by one product less."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear
from mlx_lm.utils import load_model as load_by_mlx_lm

from tests.support.expert_families import OTHERS, make_model, names
from tests.support.rows import cases
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.experts import join_experts
from vllm_mlx.runner.load_model import begin_loading, load_model
from vllm_mlx.runner.model import weights_bytes

MODES: dict[str, dict[str, Any]] = {
    "4 bits": {"bits": 4, "group_size": 64},
    "8 bits": {"bits": 8, "group_size": 64},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}


def graph_of(logits: mx.array) -> str:
    text = io.StringIO()
    mx.export_to_dot(text, logits)
    return text.getvalue()


def num_products(logits: mx.array) -> int:
    """The products of gathered experts that these logits take."""
    graph = graph_of(logits)
    return sum(graph.count(f'label ="{name}"') for name in ("GatherMM", "GatherQMM"))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_loaded_model_has_the_same_logits_by_one_product_less(checkpoint: Callable[..., Path], name: str) -> None:
    path = checkpoint(name)
    own, tokens = load_by_mlx_lm(path)[0], mx.arange(3, 43)[None]
    for _ in range(2):  # it is loaded again
        model = load_model(find_checkpoint(str(path)), trust_remote_code=False)
        check_same(own, model.module, tokens)


@pytest.mark.parametrize("name", cases(sorted({*names()} - OTHERS), ["deepseek_v3", "llama4"]))
def test_each_family_computes_the_same_by_one_product_less(name: str) -> None:
    own, joined = make_model(name), make_model(name)
    join_experts(joined)
    for num_tokens in (1, 40):  # experts of 64 rows and more are sorted
        check_same(own, joined, mx.arange(3, 3 + num_tokens)[None])


def check_same(own: Any, joined: Any, tokens: mx.array) -> None:
    expected, logits = (model(tokens, cache=make_prompt_cache(model)) for model in (own, joined))
    num_layers = sum(isinstance(part, SwitchGLU) for _, part in own.named_modules())
    assert num_products(expected) - num_products(logits) == num_layers > 0
    assert mx.array_equal(logits, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_joined_quantised_experts_compute_the_same(mode: str, has_bias: bool) -> None:
    own, joined = (quantised(MODES[mode], has_bias) for _ in range(2))
    join_experts(joined)
    for num_tokens in (1, 5, 40):
        x = mx.random.normal((1, num_tokens, 128)).astype(mx.bfloat16)
        chosen = mx.random.randint(0, 4, (1, num_tokens, 2))
        expected, y = own.layers[0](x, chosen), joined.layers[0](x, chosen)
        assert (num_products(expected), num_products(y)) == (3, 2)
        assert mx.array_equal(y, expected)


def experts(has_bias: bool = False) -> SwitchGLU:
    mx.random.seed(5)
    made = SwitchGLU(128, 64, 4, bias=has_bias)
    if has_bias:
        for linear in (made.gate_proj, made.up_proj, made.down_proj):
            linear.bias = mx.random.normal(linear.bias.shape)
    made.set_dtype(mx.bfloat16)
    return made


def quantised(mode: dict[str, Any], has_bias: bool = False) -> nn.Sequential:
    made = nn.Sequential(experts(has_bias))
    nn.quantize(made, **mode)
    return made


class OwnCall(SwitchGLU):
    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return self.gate_proj(x, indices)


class OwnLinear(SwitchLinear):
    pass


def mixed(change: Callable[[SwitchGLU], None]) -> SwitchGLU:
    made = experts()
    change(made)
    return made


def quantise(linear: str, **mode: Any) -> Callable[[SwitchGLU], None]:
    return lambda glu: setattr(glu, linear, glu[linear].to_quantized(**mode))


def both(*changes: Callable[[SwitchGLU], None]) -> Callable[[SwitchGLU], None]:
    return lambda glu: [change(glu) for change in changes] and None


APART: dict[str, Callable[[], nn.Module]] = {
    "one is quantised": lambda: mixed(quantise("up_proj", bits=4)),
    "other bits": lambda: mixed(both(quantise("up_proj", bits=4), quantise("gate_proj", bits=8))),
    "other modes": lambda: mixed(
        both(quantise("up_proj", bits=4, group_size=32), quantise("gate_proj", bits=4, group_size=32, mode="mxfp4"))
    ),
    "another setting": lambda: mixed(
        both(*(quantise(name, bits=4) for name in ("up_proj", "gate_proj")), lambda glu: setattr(glu.up_proj, "x", 1))
    ),
    "other types": lambda: mixed(lambda glu: glu.up_proj.set_dtype(mx.float32)),
    "one has a bias": lambda: mixed(lambda glu: setattr(glu.up_proj, "bias", mx.zeros((4, 64), mx.bfloat16))),
    "a scale for each expert": lambda: mixed(
        both(*(quantise(name, mode="nvfp4", group_size=16, global_scale=True) for name in ("up_proj", "gate_proj")))
    ),
    "another call": lambda: OwnCall(128, 64, 4),
    "another linear": lambda: mixed(
        lambda glu: [setattr(glu, name, OwnLinear(128, 64, 4, False)) for name in ("up_proj", "gate_proj")] and None
    ),
}


@pytest.mark.parametrize("why", APART)
def test_projections_that_differ_in_more_than_values_stay_apart(why: str) -> None:
    module = nn.Sequential(APART[why]())
    before = dict(tree_flatten(module.parameters()))
    join_experts(module)
    after = dict(tree_flatten(module.parameters()))
    assert before.keys() == after.keys() and all(after[name] is array for name, array in before.items())


def test_a_load_holds_at_most_one_layer_more(checkpoint: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"num_experts": 32, "moe_intermediate_size": 256, "num_hidden_layers": 6}
    path = checkpoint("qwen3_moe", **options)
    layer = 3 * 32 * 256 * 64 * 4
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loading = begin_loading(find_checkpoint(str(path)), trust_remote_code=False, slice_bytes=1 << 20)
    while loading.progress < 1:
        assert loading.advance() is None
    mx.synchronize()
    num_bytes = weights_bytes(load_by_mlx_lm(path, lazy=True)[0])
    assert 6 * layer < num_bytes <= mx.get_active_memory() - before < num_bytes + layer
    assert mx.get_peak_memory() - before <= num_bytes + layer
