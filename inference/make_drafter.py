"""The drafter of a head, whatever its kind."""

from __future__ import annotations

from headsmith.inference.accept import GREEDY, Rule
from headsmith.inference.drafters import Drafter, EagleDrafter
from headsmith.inference.drawn import draw_with
from headsmith.inference.medusa import MedusaDrafter
from headsmith.inference.ratio import Ratio
from headsmith.inference.tree import Draft
from headsmith.models.heads import Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target


def make_drafter(head: Head, target: Target, shape: Draft, rule: Rule = GREEDY) -> Drafter:
    """A drafter for `head`; HeadsmithError for a shape that heads of its kind cannot draft, or
    cannot draft for `rule`.
    """
    if isinstance(rule, Ratio):
        return draw_with(head, target, shape, rule)
    if isinstance(head, MedusaHead):
        return MedusaDrafter(head, target, shape)
    return EagleDrafter(head, target, shape)
