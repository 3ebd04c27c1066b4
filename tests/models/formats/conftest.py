"""Heads of every kind for the tiny target, saved as a training run saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headsmith.files import weights_sha256, write_json
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.heads import Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.provenance import target_info
from headsmith.models.target import Target

FLAGS = {"eagle3": {}, "eagle3.1": {"fc_norm": True, "norm_output": True}}


def keep(head: Head, folder: Path, target: Target, draft: str) -> Path:
    """Save a head with the headsmith.json that a training run leaves beside it."""
    head.save(folder)
    about = {
        "schema": "headsmith.head/1",
        "target": target_info(target),
        "head": head.about() | {"sha256": weights_sha256(folder)},
        "recipe": {"validation": {"draft": draft}},
        "validation": {"tau": 1.25, "requests": 4, "passes": 90},
    }
    write_json(folder / "headsmith.json", about)
    return folder


@pytest.fixture
def eagle(target: Target, draft_ids: Tensor, tmp_path: Path) -> Callable[..., Path]:
    """eagle(kind="eagle3", taps=None, draft="chain:4", ids=None, change=None, **sizes): the folder
    of a head; `change` alters it before it is saved.
    """

    def make(
        kind: str = "eagle3",
        *,
        taps: tuple[int, ...] | None = None,
        draft: str = "chain:4",
        ids: Tensor | None = None,
        change: Callable[[Eagle3Head], Any] | None = None,
        **sizes: int,
    ) -> Path:
        wanted = draft_ids if ids is None else ids
        head = Eagle3Head.for_target(target, wanted, taps=taps, seed=3, **FLAGS[kind], **sizes)
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in head.parameters():
                # Norms away from one, so that a norm that is lost shows.
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5, generator=generator)
        if change is not None:
            change(head)
        return keep(head, tmp_path / "head", target, draft)

    return make


@pytest.fixture
def medusa(target: Target, draft_ids: Tensor, tmp_path: Path) -> Callable[..., Path]:
    """medusa(lm_head, layers=1, draft="chain:3"): the folder of three heads."""

    def make(lm_head: Any, layers: int = 1, draft: str = "chain:3") -> Path:
        ids = draft_ids if lm_head == "truncated" else None
        head = MedusaHead.for_target(target, ids, num_heads=3, num_layers=layers, lm_head=lm_head)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_(0.0, 0.2, generator=generator)
        return keep(head, tmp_path / "head", target, draft)

    return make
