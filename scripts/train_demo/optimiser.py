"""Muon for the hidden matrices, AdamW for everything else."""

from collections.abc import Iterable

import torch
from torch import nn

MOMENTUM = 0.95
WEIGHT_DECAY = 0.02
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's quintic, five rounds
ADAM_ONLY = ("embed", "head", "in_proj_a", "in_proj_b")


def orthogonalised(batch: torch.Tensor) -> torch.Tensor:
    """(n, rows, columns) matrices with their singular values pushed towards one."""
    a, b, c = NEWTON_SCHULZ
    tall = batch.shape[1] > batch.shape[2]
    x = batch.mT if tall else batch
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimiser:
    """Steps every named weight; `scale` is the schedule's factor on both learning rates."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], *, muon_lr: float, adam_lr: float):
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.matrices: dict[tuple[int, ...], list[nn.Parameter]] = {}
        others = []
        for name, weight in named:
            if weight.ndim == 2 and not any(part in name for part in ADAM_ONLY):
                self.matrices.setdefault(tuple(weight.shape), []).append(weight)
            else:
                others.append(weight)
        self.momentum = {shape: torch.zeros(len(ws), *shape) for shape, ws in self.matrices.items()}
        self.adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.97), weight_decay=0.0, foreach=True)

    def state(self) -> dict:
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def restore(self, state: dict) -> None:
        self.momentum = state["momentum"]
        self.adam.load_state_dict(state["adam"])

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for shape, weights in self.matrices.items():
            self.step_matrices(shape, weights, self.muon_lr * scale)

    def step_matrices(self, shape: tuple[int, ...], weights: list[nn.Parameter], lr: float) -> None:
        if all(w.grad is None for w in weights):  # a batch without pictures leaves the vision tower alone
            return
        gradient = torch.stack([torch.zeros_like(w) if w.grad is None else w.grad for w in weights])
        momentum = self.momentum[shape]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = orthogonalised(gradient.lerp(momentum, MOMENTUM))
        step = lr * max(1.0, shape[0] / shape[1]) ** 0.5
        for weight, direction in zip(weights, update, strict=True):
            weight.mul_(1 - WEIGHT_DECAY * lr).add_(direction, alpha=-step)
            weight.grad = None
