"""AdamW over float32 weights, a cosine schedule with warm-up, and nothing hidden in state.

The learning rate is a function of the step number, so a resumed run has no scheduler to restore. A
second optimiser for part of the weights joins the list that `build_optimisers` returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from headsmith.train.recipe import TrainSection


def build_optimisers(head: nn.Module, settings: TrainSection) -> list[Optimizer]:
    """One AdamW; weight decay touches matrices only. The weights must be float32."""
    trained = [p for p in head.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in trained), "the master weights must be float32"
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return [torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)]


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
