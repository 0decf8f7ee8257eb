"""Mixtures of experts: one product computes gate and up where mlx-lm's modules take two. It knows no model family."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .libraries import QuantizedSwitchLinear, SwitchGLU, SwitchLinear


def _within_up(*_: Any, **__: Any) -> None:
    """Stand for the gate projection, whose outputs the up projection has."""


class _Halves:
    """An activation whose two inputs are the halves of one: `(..., 2 * width)` -> `(..., width)`."""

    def __init__(self, activation: Any):
        self._activation = activation

    def __call__(self, both: mx.array, _: None) -> mx.array:
        up, gate = mx.split(both, 2, axis=-1)
        result: mx.array = self._activation(up, gate)
        return result


def join_experts(module: nn.Module) -> None:
    """Append the gate weights of mlx-lm's experts to their up weights. No weights are read.

    Experts stay as they are where the two projections differ in more than their values, such as in bits, and where
    another class than mlx-lm's own computes them.
    """
    for _, part in module.named_modules():
        if type(part).__call__ is SwitchGLU.__call__ and _are_alike(part.up_proj, part.gate_proj):
            gate = part.gate_proj
            for name, array in part.up_proj.items():
                part.up_proj[name] = mx.concatenate([array, gate[name]], axis=1)
            part.gate_proj, part.activation = _within_up, _Halves(part.activation)


def _are_alike(up: Any, gate: Any) -> bool:
    """Return whether each array of both projections begins with the same axes: experts, then outputs."""
    if type(up) is not type(gate) or type(up) not in (SwitchLinear, QuantizedSwitchLinear) or vars(up) != vars(gate):
        return False
    arrays, others = ({name: (array.dtype, array.shape) for name, array in each.items()} for each in (up, gate))
    return arrays == others and all(shape[:2] == up.weight.shape[:2] for _, shape in arrays.values())
