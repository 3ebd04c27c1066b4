"""AdamW over float32 weights, a cosine schedule with warm-up, and nothing hidden in state.

The learning rate is a function of the step number, so a resumed run has no scheduler to restore. A
second optimiser for part of the weights joins the list that `build_optimisers` returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headsmith.train.recipe import TrainSection

# How fast `fc`, which a fit has put in place, moves in comparison with what has still to find one.
FUSING = 0.4


def build_optimisers(head: nn.Module, settings: TrainSection) -> list[Optimizer]:
    """One AdamW; weight decay touches matrices only. The weights must be float32.

    `fc` of an EAGLE head moves in proportion to its size, and with care: Adam's steps are of one
    size for all weights, and those that read the raw states of a deep layer are ten times smaller
    than others (docs/log.md).
    """
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 for p in trained.values()), "master weights are float32"
    fused = trained.pop("fc.weight", None)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained.values() if p.ndim >= 2]},
        {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if fused is not None:
        groups.append({"params": [fused], "scale": FUSING * _relative_size(fused)})
    groups = [
        {"weight_decay": settings.weight_decay} | group for group in groups if group["params"]
    ]
    # One pass over weights, gradients and moments instead of one an operation.
    return [torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)]


def _relative_size(weight: Tensor) -> float:
    """RMS of a matrix [out, in] by that of one which keeps the RMS of what it reads; at most 1."""
    size = float(weight.detach().square().mean().sqrt()) * weight.shape[1] ** 0.5
    return min(1.0, size)


def rate_factor(step: int, total: int, warmup_ratio: float) -> float:
    """Share of the peak learning rate at a 0-based step: linear up, then a half cosine to near 0.

    Neither end is zero: every step of the run moves the weights.
    """
    warmup = math.ceil(warmup_ratio * total)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def set_rates(optimisers: Sequence[Optimizer], settings: TrainSection, factor: float) -> float:
    """Set every group's rate to peak x factor x the group's own `scale` (1 if it has none)."""
    rate = settings.learning_rate * factor
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
    return rate
