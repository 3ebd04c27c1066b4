"""Heads as others write them: the speculators layout, other norms, rope, containers, windows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

Output = Callable[[Eagle3Head], Tensor]
H, V, D = 64, 300, 16
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def test_rope_is_read_in_the_old_and_the_new_spelling(saved: Any) -> None:
    scaled = {"rope_type": "llama3", **SCALING}
    saved.change_config(rope_theta=5e5, rope_scaling=scaled)
    old = saved.load()
    saved.change_config(
        ("rope_theta", "rope_scaling"), rope_parameters={"rope_theta": 5e5, **scaled}
    )
    new = saved.load()
    saved.change_config(("rope_parameters",), rope_theta=5e5, rope_scaling=None)
    plain = saved.load()
    positions = torch.arange(200)
    assert torch.equal(old.cos_sin(positions)[0], new.cos_sin(positions)[0])
    assert not torch.equal(old.cos_sin(positions)[0], plain.cos_sin(positions)[0])
    frequencies = 5e5 ** (-torch.arange(0, D, 2) / D)
    expected = (positions[:, None] * frequencies).cos().repeat(1, 2)
    torch.testing.assert_close(plain.cos_sin(positions)[0], expected, rtol=0, atol=1e-4)


def test_scaled_rope_survives_a_round_trip(saved: Any, other: Any) -> None:
    scaling = {"type": "llama3", **SCALING}
    saved.change_config(rope_theta=5e5, rope_scaling=scaling)
    head = saved.load()
    head.save(other.path)
    config = other.config()
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "llama3", **SCALING}
    assert other.load().config == head.config


def to_speculators(folder: Any, **top: Any) -> None:
    """Rewrite a native checkpoint in the layout that the speculators trainer saves."""
    config = folder.config()
    flags = {k: config.pop(k) for k in ("fc_norm", "norm_output") if k in config}
    body = {k: v for k, v in config.items() if k not in ("architectures", "draft_vocab_size")}
    speculators = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": None,
        "transformer_layer_config": body,
        "speculators_config": {"algorithm": "eagle3"},
    }
    (folder.path / "config.json").write_text(json.dumps(speculators | flags | top))

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
        tensors["verifier_norm.weight"] = torch.ones(H)

    folder.change_tensors(rename)


def test_speculators_layout_is_the_same_head(saved: Any, other: Any, output: Output) -> None:
    native, names = saved.load(), set(saved.tensors())
    to_speculators(saved, norm_before_residual=False)
    head = saved.load()
    assert head.config == native.config
    assert torch.equal(output(head), output(native))
    head.save(other.path)
    assert set(other.tensors()) == names


@pytest.mark.parametrize(
    ("speculators", "written", "expected"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_norm_before_residual_where_it_is_not_written(
    saved: Any, speculators: bool, written: bool | None, expected: bool
) -> None:
    flag = {} if written is None else {"norm_before_residual": written}
    if speculators:
        to_speculators(saved, **flag)
    else:
        saved.change_config(**flag)
    assert saved.load().config.norm_before_residual is expected


def test_norm_before_residual_changes_the_residual(saved: Any, output: Output) -> None:
    plain = output(saved.load())
    saved.change_config(norm_before_residual=True)
    assert not torch.allclose(output(saved.load()), plain)


def test_one_norm_over_all_taps(saved: Any) -> None:
    """`norm_before_fc`, in eagle_config as gpt-oss heads have it."""
    saved.change_config(("fc_norm",), eagle_config={"norm_before_fc": True})

    def change(tensors: dict[str, Tensor]) -> None:
        for i in range(3):
            del tensors[f"fc_norm.{i}.weight"]
        tensors["input_norm.weight"] = torch.rand(3 * H)

    saved.change_tensors(change)
    head = saved.load()
    assert head.config.norm_before_fc and not head.config.fc_norm
    taps = torch.randn(4, 3, H)
    flat = taps.flatten(1)
    norm = (flat.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps).rsqrt()
    expected = (flat * norm * head.input_norm.weight) @ head.fc.weight.T
    torch.testing.assert_close(head.fuse(taps), expected, rtol=1e-4, atol=1e-5)


def test_other_names_of_the_eagle31_flags(saved: Any, output: Output, tmp_path: Path) -> None:
    """TensorRT-LLM's name for norm_output, SGLang's older ones for fc_norm and its tensors."""
    expected = output(saved.load())
    post_norm = {"return_hidden_post_norm": True}
    saved.change_config(("fc_norm", "norm_output"), use_aux_norm=True, eagle_config=post_norm)

    def rename(tensors: dict[str, Tensor]) -> None:
        for i, place in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{place}.weight"] = tensors.pop(f"fc_norm.{i}.weight")

    saved.change_tensors(rename)
    head = saved.load()
    assert head.kind == "eagle3.1" and torch.equal(output(head), expected)
    head.save(tmp_path / "again")
    written = json.loads((tmp_path / "again/config.json").read_text())
    assert written["fc_norm"] is written["norm_output"] is True and "use_aux_norm" not in written
    saved.change_config(eagle_config={"return_hidden_post_norm": False})
    assert not saved.load().config.norm_output


def test_an_embedding_of_its_own_is_used_and_kept(target: Target, saved: Any, other: Any) -> None:
    table = torch.randn(V, H)
    saved.change_tensors(lambda t: t.update({"embed_tokens.weight": table}))
    head, ids = saved.load(), torch.tensor([5, 0, 299])
    assert torch.equal(head.embed(target, ids), table[ids])
    assert "embed_tokens.weight" not in [n for n, p in head.named_parameters() if p.requires_grad]
    head.save(other.path)
    assert torch.equal(other.load().embed(target, ids), table[ids])
    fresh = Eagle3Head.for_target(target, torch.arange(V))
    assert torch.equal(fresh.embed(target, ids), target.embed(ids))


@pytest.mark.parametrize("how", ["pickled", "sharded"])
def test_other_containers(saved: Any, how: str, output: Output) -> None:
    expected = output(saved.load())
    tensors = saved.tensors()
    saved.weights.unlink()
    if how == "pickled":
        torch.save(tensors, saved.path / "pytorch_model.bin")
    else:
        index = {}
        for i, name in enumerate(sorted(tensors)):
            index[name] = f"model-{i % 2}.safetensors"
        for file in set(index.values()):
            part = {n: t for n, t in tensors.items() if index[n] == file}
            save_file(part, saved.path / file, {"format": "pt"})
        (saved.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(output(saved.load()), expected)


def test_a_window_is_read_where_the_layer_asks_for_it(saved: Any, other: Any) -> None:
    saved.change_config(sliding_window=32)
    assert saved.load().config.sliding_window is None
    saved.change_config(sliding_window=32, layer_types=["sliding_attention"])
    head = saved.load()
    assert head.config.sliding_window == 32
    head.save(other.path)
    assert other.load().config.sliding_window == 32
