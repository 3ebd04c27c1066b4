"""Distillation losses of one unroll step (spec/eagle.md 3.3): sums over rows, float32, never means.

Shapes: n rows, V_d draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headsmith.models.linear import at_least_float32

LossName = Literal["kl", "lk", "ce", "mix"]


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Which loss. `kl`: forward KL over the draft vocabulary. `lk`: the acceptance-aware mix of
    arXiv 2602.23881. For Medusa heads `ce`: cross entropy of the text itself, and `mix`: ce_weight
    x ce + the rest x kl.
    """

    name: LossName = "kl"
    kl_scale: float = 1.0
    kl_decay: float = 3.0
    ce_weight: float = 0.5


def step_loss(
    settings: LossSettings, logits: Tensor, teacher: Tensor, logsumexp: Tensor, covered: Tensor
) -> Tensor:
    """Sum of one step's loss over its rows: the definition, by autograd over all logits. Training
    computes the same a chunk at a time (`headsmith.train.kernels.distil`).

    logits [n, V_d] of the head; teacher [n, V_d] the target's logits of the draft ids; logsumexp
    [n] over the target's whole vocabulary; covered [n] bool, whether the target's first choice can
    be drafted at all.
    """
    logits = at_least_float32(logits)
    kl = KlOverDraftIds.apply(logits, teacher)
    assert settings.name in ("kl", "lk"), "the other losses are those of train/medusa.py"
    if settings.name == "kl":
        # A row whose first choice cannot be drafted would teach confidence in a token that is never
        # accepted.
        return (kl * covered).sum()
    # What a sampled draft is accepted with: sum of min(p, q), p not renormalised over the draft
    # ids.
    p = (teacher - logsumexp[:, None]).exp()
    alpha = torch.minimum(p, logits.softmax(-1)).sum(-1)
    weight = settings.kl_scale * torch.exp(-settings.kl_decay * alpha.detach()) * covered
    return (weight * kl + (1 - weight) * (1 - alpha)).sum()


class KlOverDraftIds(torch.autograd.Function):
    """KL(p || q) of each row [n], p and q softmaxed over the draft ids. Only the gradient q - p is
    kept for backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor) -> Tensor:
        log_q, log_p = logits.log_softmax(-1), teacher.log_softmax(-1)
        p = log_p.exp()
        kl = (p * (log_p - log_q)).sum(-1)
        ctx.save_for_backward(log_q.exp_().sub_(p))
        return kl

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * grad[:, None], None
