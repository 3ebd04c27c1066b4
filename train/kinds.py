"""What the trainer must know of each kind of head. Everything else it does to all alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headsmith.train.loss import LossSettings
from headsmith.train.medusa import medusa_losses
from headsmith.train.recipe import Recipe
from headsmith.train.unroll import UnrollResult, unroll_losses


@dataclass(frozen=True, slots=True)
class Kind:
    """losses(head, target, row, steps, settings) of one packed row.

    unrolls: step k needs step k - 1, so that training may begin with few of them; else they are
    heads of their own.
    """

    losses: Callable[..., UnrollResult]
    unrolls: bool


KINDS = {
    "eagle3": Kind(unroll_losses, unrolls=True),
    "eagle3.1": Kind(unroll_losses, unrolls=True),
    "medusa": Kind(medusa_losses, unrolls=False),
}


def loss_settings(recipe: Recipe) -> LossSettings:
    """The loss that a recipe asks for, from the section that says it for its kind of head."""
    if recipe.head.kind == "medusa":
        return LossSettings(recipe.head.loss, ce_weight=recipe.head.ce_weight)
    return LossSettings(recipe.train.loss, recipe.train.kl_scale, recipe.train.kl_decay)
