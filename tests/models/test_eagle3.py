"""The head's files and their checks: native layout, speculators layout, and what is refused."""

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
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

H, INNER, V, VD, D = 64, 96, 300, 48, 16
LAYERS = 8
SHAPES = {
    "fc.weight": [H, 3 * H],
    "midlayer.hidden_norm.weight": [H],
    "midlayer.input_layernorm.weight": [H],
    "midlayer.self_attn.q_proj.weight": [4 * D, 2 * H],
    "midlayer.self_attn.k_proj.weight": [2 * D, 2 * H],
    "midlayer.self_attn.v_proj.weight": [2 * D, 2 * H],
    "midlayer.self_attn.o_proj.weight": [H, 4 * D],
    "midlayer.post_attention_layernorm.weight": [H],
    "midlayer.mlp.gate_proj.weight": [INNER, H],
    "midlayer.mlp.up_proj.weight": [INNER, H],
    "midlayer.mlp.down_proj.weight": [H, INNER],
    "norm.weight": [H],
    "lm_head.weight": [VD, H],
    "d2t": [VD],
    "t2d": [V],
}
FC_NORM = {f"fc_norm.{i}.weight": [H] for i in range(3)}


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.load(tiny_target_dir)


@pytest.fixture(scope="module")
def draft_ids() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randperm(V, generator=generator)[:VD].sort().values


@pytest.fixture
def saved(target: Target, draft_ids: Tensor, tmp_path: Path) -> Path:
    """The folder of an EAGLE-3.1 head."""
    head = Eagle3Head.for_target(target, draft_ids, fc_norm=True, norm_output=True, seed=3)
    head.save(tmp_path / "head")
    return tmp_path / "head"


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    config = {k: v for k, v in (read_config(folder) | changes).items() if k not in remove}
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def load(folder: Path, **arguments: Any) -> Eagle3Head:
    return Eagle3Head.load(folder, num_target_layers=LAYERS, **arguments)


def output(head: Eagle3Head) -> Tensor:
    """Something that every tensor of the head but the embedding enters."""
    generator = torch.Generator().manual_seed(9)
    taps = torch.randn(5, head.config.num_taps, H, generator=generator, dtype=head.fc.weight.dtype)
    layer, z = head.midlayer, head.fuse(taps)
    cos, sin = head.cos_sin(torch.arange(5))
    u = layer.inputs(torch.randn(5, H, generator=generator, dtype=z.dtype), z)
    keys, values = layer.key_value(u, cos, sin)
    mixed = layer.query(u, cos, sin) + (keys * values).repeat_interleave(2, 0)
    return head.logits(head.feedback(layer.output(z, mixed)))


@pytest.mark.parametrize("fc_norm", [False, True])
def test_files_hold_exactly_the_tensors_of_the_native_layout(
    fc_norm: bool, target: Target, draft_ids: Tensor, tmp_path: Path
) -> None:
    Eagle3Head.for_target(target, draft_ids, fc_norm=fc_norm).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = SHAPES | (FC_NORM if fc_norm else {})
    assert {name: list(t.shape) for name, t in tensors.items()} == expected
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(VD) + tensors["d2t"], draft_ids)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), draft_ids)


def test_config_says_what_every_engine_needs(target: Target, saved: Path) -> None:
    config = read_config(saved)
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": INNER,
        "head_dim": D,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "draft_vocab_size": VD,
        "hidden_act": "silu",
        "rms_norm_eps": target.config.rms_norm_eps,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": target.config.bos_token_id,
        "eos_token_id": target.config.eos_token_id,
        "torch_dtype": "float32",
        "use_cache": True,
        "initializer_range": target.config.initializer_range,
        "fc_norm": True,
        "norm_output": True,
    }


def test_a_fresh_head_starts_from_the_targets_rows(target: Target, draft_ids: Tensor) -> None:
    head = Eagle3Head.for_target(target, draft_ids, seed=3)
    assert torch.equal(head.lm_head.weight, target.head_weight[draft_ids])
    again = Eagle3Head.for_target(target, draft_ids, seed=3)
    other = Eagle3Head.for_target(target, draft_ids, seed=4)
    assert torch.equal(head.fc.weight, again.fc.weight)
    assert not torch.equal(head.fc.weight, other.fc.weight)
    assert head.embed_tokens is None and head.kind == "eagle3"
    assert all(p.dtype == torch.float32 for p in head.parameters())


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_round_trip(
    fc_norm: bool, norm_output: bool, target: Target, draft_ids: Tensor, tmp_path: Path
) -> None:
    head = Eagle3Head.for_target(target, draft_ids, fc_norm=fc_norm, norm_output=norm_output)
    head.save(tmp_path)
    again = load(tmp_path)
    assert again.config == head.config
    assert again.kind == ("eagle3.1" if fc_norm and norm_output else "eagle3")
    assert again.taps == (2, 4, 5)
    assert torch.equal(again.draft_ids, draft_ids)
    assert torch.equal(output(again), output(head))


def test_saved_in_bfloat16(target: Target, draft_ids: Tensor, tmp_path: Path) -> None:
    head = Eagle3Head.for_target(target, draft_ids)
    head.save(tmp_path, torch.bfloat16)
    assert read_config(tmp_path)["torch_dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["fc.weight"].dtype == torch.bfloat16 and tensors["d2t"].dtype == torch.int64
    again = load(tmp_path)
    assert again.fc.weight.dtype == torch.float32
    assert torch.equal(again.fc.weight, head.fc.weight.bfloat16().float())


def test_rotary_angles_stay_exact_in_bfloat16(saved: Path) -> None:
    positions = torch.tensor([0, 7, 511])
    exact, _ = load(saved).cos_sin(positions)
    short, _ = load(saved, dtype=torch.bfloat16).cos_sin(positions)
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short.float(), exact, rtol=0, atol=4e-3)


def test_the_whole_vocabulary_needs_no_mapping(target: Target, tmp_path: Path) -> None:
    Eagle3Head.for_target(target, torch.arange(V)).save(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "d2t" not in names and "t2d" not in names
    assert read_config(tmp_path)["draft_vocab_size"] == V
    assert torch.equal(load(tmp_path).draft_ids, torch.arange(V))


@pytest.mark.parametrize("taps", [(1, 3, 6), (4,), (0, 8)])
def test_other_taps_are_written_in_both_numberings(
    taps: tuple[int, ...], target: Target, draft_ids: Tensor, tmp_path: Path
) -> None:
    Eagle3Head.for_target(target, draft_ids, taps=taps).save(tmp_path)
    config = read_config(tmp_path)
    assert config["eagle_aux_hidden_state_layer_ids"] == list(taps)
    nested = config["eagle_config"]
    assert nested["eagle_aux_hidden_state_layer_ids"] == [t - 1 for t in taps]
    assert nested["use_aux_hidden_state"] is True
    assert config.get("num_aux_hidden_states") == (None if len(taps) == 3 else len(taps))
    assert Eagle3Head.load(tmp_path).taps == taps


def test_default_taps_that_are_named_are_not_written(
    target: Target, draft_ids: Tensor, tmp_path: Path
) -> None:
    Eagle3Head.for_target(target, draft_ids, taps=(2, 4, 5)).save(tmp_path)
    assert "eagle_aux_hidden_state_layer_ids" not in read_config(tmp_path)
    assert "eagle_config" not in read_config(tmp_path)


def test_taps_of_the_config_and_of_the_caller(saved: Path) -> None:
    with pytest.raises(HeadsmithError, match="names no taps"):
        Eagle3Head.load(saved)
    assert Eagle3Head.load(saved, taps=(0, 1, 2)).taps == (0, 1, 2)
    change_config(saved, eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 4, 6]})
    assert load(saved).taps == (3, 4, 6)
    change_config(saved, eagle_aux_hidden_state_layer_ids=[1, 2, 7])
    assert load(saved).taps == (1, 2, 7)


@pytest.mark.parametrize("taps", [[2, 2, 5], [5, 4, 2]])
def test_taps_must_ascend(saved: Path, taps: list[int]) -> None:
    change_config(saved, eagle_aux_hidden_state_layer_ids=taps)
    with pytest.raises(HeadsmithError, match="ascending and distinct"):
        load(saved)


SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def test_rope_is_read_in_the_old_and_the_new_spelling(saved: Path) -> None:
    scaled = {"rope_type": "llama3", **SCALING}
    change_config(saved, rope_theta=5e5, rope_scaling=scaled)
    old = load(saved)
    change_config(
        saved, ("rope_theta", "rope_scaling"), rope_parameters={"rope_theta": 5e5, **scaled}
    )
    new = load(saved)
    change_config(saved, ("rope_parameters",), rope_theta=5e5, rope_scaling=None)
    plain = load(saved)
    positions = torch.arange(200)
    assert torch.equal(old.cos_sin(positions)[0], new.cos_sin(positions)[0])
    assert not torch.equal(old.cos_sin(positions)[0], plain.cos_sin(positions)[0])
    frequencies = 5e5 ** (-torch.arange(0, D, 2) / D)
    expected = (positions[:, None] * frequencies).cos().repeat(1, 2)
    torch.testing.assert_close(plain.cos_sin(positions)[0], expected, rtol=0, atol=1e-4)


def test_scaled_rope_survives_a_round_trip(saved: Path, tmp_path: Path) -> None:
    scaling = {"type": "llama3", **SCALING}
    change_config(saved, rope_theta=5e5, rope_scaling=scaling)
    head = load(saved)
    head.save(tmp_path / "again")
    config = read_config(tmp_path / "again")
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "llama3", **SCALING}
    assert load(tmp_path / "again").config == head.config


def to_speculators(folder: Path, **top: Any) -> None:
    """Rewrite a native checkpoint in the layout that the speculators trainer saves."""
    config = read_config(folder)
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
    (folder / "config.json").write_text(json.dumps(speculators | flags | top))

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
        tensors["verifier_norm.weight"] = torch.ones(H)

    change_tensors(folder, rename)


def test_speculators_layout_is_the_same_head(saved: Path, tmp_path: Path) -> None:
    native = load(saved)
    to_speculators(saved, norm_before_residual=False)
    head = load(saved)
    assert head.config == native.config
    assert torch.equal(output(head), output(native))
    head.save(tmp_path / "native")
    assert {n for n in load_file(tmp_path / "native" / "model.safetensors")} == {*SHAPES, *FC_NORM}


@pytest.mark.parametrize(
    ("speculators", "written", "expected"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_norm_before_residual_where_it_is_not_written(
    saved: Path, speculators: bool, written: bool | None, expected: bool
) -> None:
    flag = {} if written is None else {"norm_before_residual": written}
    if speculators:
        to_speculators(saved, **flag)
    else:
        change_config(saved, **flag)
    assert load(saved).config.norm_before_residual is expected


def test_norm_before_residual_changes_the_residual(saved: Path) -> None:
    plain = output(load(saved))
    change_config(saved, norm_before_residual=True)
    assert not torch.allclose(output(load(saved)), plain)


def test_one_norm_over_all_taps(saved: Path) -> None:
    """`norm_before_fc`, in eagle_config as gpt-oss heads have it."""
    change_config(saved, ("fc_norm",), eagle_config={"norm_before_fc": True})

    def change(tensors: dict[str, Tensor]) -> None:
        for name in FC_NORM:
            del tensors[name]
        tensors["input_norm.weight"] = torch.rand(3 * H)

    change_tensors(saved, change)
    head = load(saved)
    assert head.config.norm_before_fc and not head.config.fc_norm
    taps = torch.randn(4, 3, H)
    flat = taps.flatten(1)
    norm = (flat.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps).rsqrt()
    expected = (flat * norm * head.input_norm.weight) @ head.fc.weight.T
    torch.testing.assert_close(head.fuse(taps), expected, rtol=1e-4, atol=1e-5)


def test_other_names_of_the_eagle31_flags(saved: Path, tmp_path: Path) -> None:
    """TensorRT-LLM's name for norm_output, SGLang's older ones for fc_norm and its tensors."""
    expected = output(load(saved))
    post_norm = {"return_hidden_post_norm": True}
    change_config(saved, ("fc_norm", "norm_output"), use_aux_norm=True, eagle_config=post_norm)

    def rename(tensors: dict[str, Tensor]) -> None:
        for i, place in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{place}.weight"] = tensors.pop(f"fc_norm.{i}.weight")

    change_tensors(saved, rename)
    head = load(saved)
    assert head.kind == "eagle3.1" and torch.equal(output(head), expected)
    head.save(tmp_path / "again")
    written = read_config(tmp_path / "again")
    assert written["fc_norm"] is written["norm_output"] is True and "use_aux_norm" not in written
    change_config(saved, eagle_config={"return_hidden_post_norm": False})
    assert not load(saved).config.norm_output


def test_an_embedding_of_its_own_is_used_and_kept(
    target: Target, saved: Path, tmp_path: Path
) -> None:
    table = torch.randn(V, H)
    change_tensors(saved, lambda t: t.update({"embed_tokens.weight": table}))
    head, ids = load(saved), torch.tensor([5, 0, 299])
    assert torch.equal(head.embed(target, ids), table[ids])
    assert "embed_tokens.weight" not in [n for n, p in head.named_parameters() if p.requires_grad]
    head.save(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again").embed(target, ids), table[ids])
    fresh = Eagle3Head.for_target(target, torch.arange(V))
    assert torch.equal(fresh.embed(target, ids), target.embed(ids))


@pytest.mark.parametrize("how", ["pickled", "sharded"])
def test_other_containers(saved: Path, how: str) -> None:
    expected = output(load(saved))
    weights = saved / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    if how == "pickled":
        torch.save(tensors, saved / "pytorch_model.bin")
    else:
        index = {}
        for i, name in enumerate(sorted(tensors)):
            index[name] = f"model-{i % 2}.safetensors"
        for file in set(index.values()):
            part = {n: t for n, t in tensors.items() if index[n] == file}
            save_file(part, saved / file, {"format": "pt"})
        (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(output(load(saved)), expected)


def refused(folder: Path, words: str) -> None:
    with pytest.raises(HeadsmithError, match=words) as caught:
        load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_tensors_that_do_not_fit(saved: Path) -> None:
    whole = load_file(saved / "model.safetensors")
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
        save_file(whole, saved / "model.safetensors", {"format": "pt"})
        change_tensors(saved, change)
        refused(saved, words)


def test_flags_that_the_tensors_do_not_have(saved: Path) -> None:
    change_config(saved, fc_norm=False)
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
def test_configs_that_are_refused(saved: Path, changes: dict[str, Any], words: str) -> None:
    change_config(saved, **changes)
    refused(saved, words)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size"])
def test_a_config_without_a_width(saved: Path, key: str) -> None:
    change_config(saved, (key,))
    refused(saved, f"has no {key}")


def test_files_that_are_missing_or_cut_off(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "is not a head: there is no config.json")
    weights = saved / "model.safetensors"
    whole = weights.read_bytes()
    for kept in (0, 7, 200, len(whole) - 1):
        weights.write_bytes(whole[:kept])
        refused(saved, "cannot be read")
    weights.unlink()
    refused(saved, "has no weights")
    for content in (b"", b"\x80\x02cut", whole[:100]):
        (saved / "pytorch_model.bin").write_bytes(content)
        refused(saved, "cannot be read")
    (saved / "pytorch_model.bin").unlink()
    index = saved / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "gone.safetensors"}}))
    refused(saved, "gone.safetensors cannot be read")
    (saved / "config.json").write_text('{"hidden_size": 6')
    refused(saved, "not valid JSON")
    (saved / "config.json").write_text("[]")
    refused(saved, "no JSON object")


def test_a_window_is_read_where_the_layer_asks_for_it(saved: Path, tmp_path: Path) -> None:
    change_config(saved, sliding_window=32)
    assert load(saved).config.sliding_window is None
    change_config(saved, sliding_window=32, layer_types=["sliding_attention"])
    head = load(saved)
    assert head.config.sliding_window == 32
    head.save(tmp_path / "again")
    assert load(tmp_path / "again").config.sliding_window == 32
