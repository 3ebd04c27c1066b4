"""What is refused in a checkpoint of Medusa heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.models.heads import load_head
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import LmHead
from headsmith.models.target import Target

H, V, VD, K, L = 64, 300, 48, 3, 2
KINDS: list[LmHead] = ["shared", "private", "truncated"]


def change(folder: Path, what: Callable[[dict[str, Tensor]], object] | None, **config: Any) -> None:
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    if what is not None:
        what(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def nan(tensors: dict[str, Tensor]) -> None:
    tensors["blocks.1.layers.0.bias"][3] = float("nan")


def nan_in_lm_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"][3, 0] = float("nan")


def other_lm_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1


def twice(tensors: dict[str, Tensor]) -> None:
    tensors["token_map"][1] = tensors["token_map"][0]


@pytest.mark.parametrize(
    ("kind", "what", "config", "said"),
    [
        ("shared", lambda t: t.pop("blocks.2.layers.1.bias"), {}, "lacks blocks.2.layers.1.bias;"),
        ("shared", lambda t: t.pop("lm_head.weight"), {}, "lacks lm_head.weight, the copy"),
        ("private", lambda t: t.pop("lm_heads.0.weight"), {}, "lacks lm_heads.0.weight"),
        ("shared", lambda t: t.update(x=torch.ones(1)), {}, "has x, which its config does not"),
        ("shared", None, {"num_heads": 2}, "has blocks.2.layers.0.bias, which its config does"),
        ("shared", None, {"num_heads": 4}, "lacks blocks.3.layers.0.bias"),
        ("shared", None, {"hidden_size": 32}, r"lm_head.weight is \[300, 64\], its config asks"),
        (
            "private",
            None,
            {"hidden_size": 32},
            r"layers.0.bias is \[64\], its config asks for \[32",
        ),
        ("shared", nan, {}, "blocks.1.layers.0.bias holds NaN or infinity"),
        ("shared", nan_in_lm_head, {}, "lm_head.weight holds NaN or infinity"),
        ("shared", other_lm_head, {}, "lm_head.weight is not that of the target"),
        ("shared", None, {"medusa_fc_bias": False}, "without a bias are not supported"),
        ("shared", None, {"num_heads": 0}, "0 Medusa heads of 2 layers draft nothing"),
        ("truncated", None, {"original_lm_head": False}, "private lm_heads over a truncated"),
        ("truncated", None, {"truncated_vocab_size": 47}, "token_map has 48 entries for a vocab"),
        (
            "truncated",
            lambda t: t.pop("token_map"),
            {},
            "drafts 48 of 300 ids but has no token_map",
        ),
        ("truncated", twice, {}, "token_map names ids outside the target's 300 or one of them tw"),
        (
            "private",
            lambda t: t.update(token_map=torch.arange(V)),
            {},
            "has a token_map and drafts",
        ),
    ],
)
def test_what_is_refused_in_a_checkpoint(
    kind: LmHead,
    what: Callable[[dict[str, Tensor]], object] | None,
    config: dict[str, Any],
    said: str,
    target: Target,
    make: Callable[..., MedusaHead],
    tmp_path: Path,
) -> None:
    make(kind).save(tmp_path)
    change(tmp_path, what, **config)
    with pytest.raises(HeadsmithError, match=said) as caught:
        load_head(tmp_path, target)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_that_lacks_a_key_is_named(
    target: Target, make: Callable[..., MedusaHead], tmp_path: Path
) -> None:
    make("shared").save(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(HeadsmithError, match="config.json has no num_hidden_layers"):
        load_head(tmp_path, target)


def test_a_draft_vocabulary_needs_a_truncated_lm_head(target: Target, draft_ids: Tensor) -> None:
    with pytest.raises(HeadsmithError, match="lm_head that is private cannot draft 48 of 300"):
        MedusaHead.for_target(target, draft_ids, lm_head="private")
    with pytest.raises(HeadsmithError, match="lm_head that is truncated cannot draft 300 of 300"):
        MedusaHead.for_target(target, lm_head="truncated")
