"""Good heads with their record, for tests to break."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headsmith.files import weights_sha256
from headsmith.models.doctor.examine import examine
from headsmith.models.doctor.findings import Finding
from headsmith.models.doctor.target import TargetFacts
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.provenance import target_info
from headsmith.models.target import Target


@dataclass(slots=True)
class Patient:
    """A head's folder, and ways to break it."""

    folder: Path

    def change(self, name: str, remove: tuple[str, ...] = (), **values: Any) -> None:
        """Set keys of config.json or headsmith.json; `a__b` is key b in a."""
        path = self.folder / name
        whole = json.loads(path.read_text())
        for key, value in values.items():
            place = whole
            *outer, last = key.split("__")
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = value
        for key in remove:
            del whole[key]
        path.write_text(json.dumps(whole))

    def config(self, remove: tuple[str, ...] = (), **values: Any) -> None:
        self.change("config.json", remove, **values)

    def record(self, remove: tuple[str, ...] = (), **values: Any) -> None:
        self.change("headsmith.json", remove, **values)

    def taps(self, taps: list[int]) -> None:
        """Other taps, for which it was trained."""
        self.config(eagle_aux_hidden_state_layer_ids=taps)
        self.record(head__taps=taps)

    def tensors(self, change: Callable[[dict[str, Tensor]], object]) -> None:
        """Change the weights, and the record of them."""
        file = self.folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
        self.record(head__sha256=weights_sha256(self.folder))

    def findings(self, target: TargetFacts | None) -> list[Finding]:
        return examine(self.folder, target)


def saved(head: Eagle3Head | MedusaHead, folder: Path, target: Target) -> Patient:
    head.save(folder)
    about = {
        "target": target_info(target),
        "head": {**head.about(), "sha256": weights_sha256(folder)},
        "recipe": {"data": {"max_length": 512}},
    }
    (folder / "headsmith.json").write_text(json.dumps(about))
    return Patient(folder)


@pytest.fixture(scope="session")
def facts(tiny_target_dir: Path) -> TargetFacts:
    """What doctor reads of the target, which it does not load."""
    return TargetFacts.read(str(tiny_target_dir))


@pytest.fixture(scope="session")
def ids(target: Target) -> Tensor:
    """A draft vocabulary with what ends an answer in it."""
    kept = {*range(0, 300, 7), *target.always_drafted}
    return torch.tensor(sorted(kept))


@pytest.fixture
def eagle(target: Target, ids: Tensor, tmp_path: Path) -> Patient:
    """A healthy EAGLE-3.1 head."""
    head = Eagle3Head.for_target(target, ids, fc_norm=True, norm_output=True)
    return saved(head, tmp_path / "head", target)


@pytest.fixture
def medusa(target: Target, tmp_path: Path) -> Patient:
    """Healthy Medusa heads that share the target's lm_head."""
    heads = MedusaHead.for_target(target, num_heads=3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.01)
    return saved(heads, tmp_path / "heads", target)
