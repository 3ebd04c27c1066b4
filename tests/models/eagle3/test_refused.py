"""Heads that are refused: what does not fit, is missing or cut off, said in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headsmith.errors import HeadsmithError

H, V = 64, 300


def refused(folder: Any, words: str) -> None:
    with pytest.raises(HeadsmithError, match=words) as caught:
        folder.load()
    assert str(folder.path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("taps", [[2, 2, 5], [5, 4, 2]])
def test_taps_must_ascend(saved: Any, taps: list[int]) -> None:
    saved.change_config(eagle_aux_hidden_state_layer_ids=taps)
    with pytest.raises(HeadsmithError, match="ascending and distinct"):
        saved.load()


def test_tensors_that_do_not_fit(saved: Any) -> None:
    whole = saved.tensors()
    cases: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
        (lambda t: t.pop("fc.weight"), "lacks fc.weight"),
        (lambda t: t.update({"other.weight": torch.ones(2)}), "has other.weight, which"),
        (lambda t: t.pop("fc_norm.1.weight"), "lacks fc_norm.1.weight"),
        (lambda t: t.update({"norm.weight": torch.ones(H + 1)}), r"norm.weight is \[65\]"),
        (lambda t: t["midlayer.mlp.up_proj.weight"][3].fill_(float("nan")), "up_proj.* NaN"),
        (lambda t: t["norm.weight"][3].fill_(float("inf")), "norm.weight holds NaN or infinity"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(V - 1, H)}), "embed_tokens"),
        (lambda t: t.pop("d2t"), "has no d2t"),
        (lambda t: t.update({"d2t": t["d2t"][1:].clone()}), "47 entries for a draft vocabulary"),
        (lambda t: t["d2t"][-1].add_(V), "maps outside the target's 300 ids"),
        (lambda t: t["d2t"][0].fill_(-1), "maps outside the target's 300 ids"),
        (lambda t: t["d2t"][1].copy_(t["d2t"][0] - 1), "twice to one"),
        (lambda t: t["t2d"].logical_not_(), "d2t and t2d name different ids"),
    ]
    for change, words in cases:
        save_file(whole, saved.weights, {"format": "pt"})
        saved.change_tensors(change)
        refused(saved, words)


def test_flags_that_the_tensors_do_not_have(saved: Any) -> None:
    saved.change_config(fc_norm=False)
    refused(saved, "has fc_norm.0.weight, which its config does not announce")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"model_type": "qwen3"}, "model type qwen3"),
        ({"draft_vocab_size": V + 1}, "does not fit the target's 300"),
        ({"num_key_value_heads": 3}, "evenly"),
    ],
)
def test_configs_that_are_refused(saved: Any, changes: dict[str, Any], words: str) -> None:
    saved.change_config(**changes)
    refused(saved, words)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size"])
def test_a_config_without_a_width(saved: Any, key: str) -> None:
    saved.change_config((key,))
    refused(saved, f"has no {key}")


def test_files_that_are_missing_or_cut_off(saved: Any, other: Any) -> None:
    other.path.mkdir()
    refused(other, "is not a head: there is no config.json")
    weights = saved.weights
    whole = weights.read_bytes()
    for kept in (0, 7, 200, len(whole) - 1):
        weights.write_bytes(whole[:kept])
        refused(saved, "cannot be read")
    weights.unlink()
    refused(saved, "has no weights")
    for content in (b"", b"\x80\x02cut", whole[:100]):
        (saved.path / "pytorch_model.bin").write_bytes(content)
        refused(saved, "cannot be read")
    (saved.path / "pytorch_model.bin").unlink()
    index = saved.path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "gone.safetensors"}}))
    refused(saved, "gone.safetensors cannot be read")
    (saved.path / "config.json").write_text('{"hidden_size": 6')
    refused(saved, "not valid JSON")
    (saved.path / "config.json").write_text("[]")
    refused(saved, "no JSON object")
