"""A saved head whose files a test reads, changes and loads."""

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

from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target


@dataclass(slots=True)
class HeadFolder:
    """The folder of a head for `tiny_target_dir`'s target."""

    path: Path

    @property
    def weights(self) -> Path:
        return self.path / "model.safetensors"

    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.weights)

    def change_config(self, remove: tuple[str, ...] = (), **changes: Any) -> None:
        config = {k: v for k, v in (self.config() | changes).items() if k not in remove}
        (self.path / "config.json").write_text(json.dumps(config))

    def change_tensors(self, change: Callable[[dict[str, Tensor]], object]) -> None:
        tensors = self.tensors()
        change(tensors)
        save_file(tensors, self.weights, {"format": "pt"})

    def load(self, **arguments: Any) -> Eagle3Head:
        return Eagle3Head.load(self.path, num_target_layers=8, **arguments)


@pytest.fixture
def saved(target: Target, draft_ids: Tensor, tmp_path: Path) -> HeadFolder:
    """An EAGLE-3.1 head."""
    head = Eagle3Head.for_target(target, draft_ids, fc_norm=True, norm_output=True, seed=3)
    head.save(tmp_path / "head")
    return HeadFolder(tmp_path / "head")


@pytest.fixture
def other(tmp_path: Path) -> HeadFolder:
    """Where a test saves a head itself; not there before."""
    return HeadFolder(tmp_path / "other")


def compute(head: Eagle3Head) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    shape = (5, head.config.num_taps, head.config.hidden_size)
    taps = torch.randn(shape, generator=generator, dtype=head.fc.weight.dtype)
    layer, z = head.midlayer, head.fuse(taps)
    cos, sin = head.cos_sin(torch.arange(5))
    u = layer.inputs(torch.randn(z.shape, generator=generator, dtype=z.dtype), z)
    keys, values = layer.key_value(u, cos, sin)
    mixed = layer.query(u, cos, sin) + (keys * values).repeat_interleave(2, 0)
    return head.logits(head.feedback(layer.output(z, mixed)))


@pytest.fixture(scope="session")
def output() -> Callable[[Eagle3Head], Tensor]:
    """output(head): something that every tensor of the head but the embedding enters."""
    return compute
