"""Medusa heads of three heads and two layers, of every kind of lm_head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import LmHead
from headsmith.models.target import Target

K, L = 3, 2


@pytest.fixture
def make(target: Target, draft_ids: Tensor) -> Callable[..., MedusaHead]:
    """make(lm_head, fresh=False): K heads of L layers, of random weights unless they are fresh."""

    def head(kind: LmHead, fresh: bool = False) -> MedusaHead:
        ids = draft_ids if kind == "truncated" else None
        one = MedusaHead.for_target(target, ids, num_heads=K, num_layers=L, lm_head=kind)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in () if fresh else one.parameters():
                parameter.normal_(0.0, 0.2, generator=generator)
        return one

    return head
