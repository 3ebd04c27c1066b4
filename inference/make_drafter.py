"""The drafter of a head, whatever its kind."""

from __future__ import annotations

from headsmith.inference.drafters import Drafter, EagleDrafter
from headsmith.inference.medusa import MedusaDrafter
from headsmith.inference.tree import Draft
from headsmith.models.heads import Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target


def make_drafter(head: Head, target: Target, shape: Draft) -> Drafter:
    """A drafter for `head`; HeadsmithError for a shape that heads of its kind cannot draft."""
    if isinstance(head, MedusaHead):
        return MedusaDrafter(head, target, shape)
    return EagleDrafter(head, target, shape)
