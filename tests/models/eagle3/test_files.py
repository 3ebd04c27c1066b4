"""The files of a head in the native layout: tensors, config, types, draft vocabulary and taps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

Output = Callable[[Eagle3Head], Tensor]
H, INNER, V, VD, D = 64, 96, 300, 48, 16
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


@pytest.mark.parametrize("fc_norm", [False, True])
def test_files_hold_exactly_the_tensors_of_the_native_layout(
    fc_norm: bool, target: Target, draft_ids: Tensor, other: Any
) -> None:
    Eagle3Head.for_target(target, draft_ids, fc_norm=fc_norm).save(other.path)
    tensors = other.tensors()
    expected = SHAPES | (FC_NORM if fc_norm else {})
    assert {name: list(t.shape) for name, t in tensors.items()} == expected
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(VD) + tensors["d2t"], draft_ids)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), draft_ids)


def test_config_says_what_every_engine_needs(target: Target, saved: Any) -> None:
    config = saved.config()
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
    fc_norm: bool,
    norm_output: bool,
    target: Target,
    draft_ids: Tensor,
    other: Any,
    output: Output,
) -> None:
    head = Eagle3Head.for_target(target, draft_ids, fc_norm=fc_norm, norm_output=norm_output)
    head.save(other.path)
    again = other.load()
    assert again.config == head.config
    assert again.kind == ("eagle3.1" if fc_norm and norm_output else "eagle3")
    assert again.taps == (2, 4, 5)
    assert torch.equal(again.draft_ids, draft_ids)
    assert torch.equal(output(again), output(head))


def test_saved_in_bfloat16(target: Target, draft_ids: Tensor, other: Any) -> None:
    head = Eagle3Head.for_target(target, draft_ids)
    head.save(other.path, torch.bfloat16)
    assert other.config()["torch_dtype"] == "bfloat16"
    tensors = other.tensors()
    assert tensors["fc.weight"].dtype == torch.bfloat16 and tensors["d2t"].dtype == torch.int64
    again = other.load()
    assert again.fc.weight.dtype == torch.float32
    assert torch.equal(again.fc.weight, head.fc.weight.bfloat16().float())


def test_rotary_angles_stay_exact_in_bfloat16(saved: Any) -> None:
    positions = torch.tensor([0, 7, 511])
    exact, _ = saved.load().cos_sin(positions)
    short, _ = saved.load(dtype=torch.bfloat16).cos_sin(positions)
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short.float(), exact, rtol=0, atol=4e-3)


def test_the_whole_vocabulary_needs_no_mapping(target: Target, other: Any) -> None:
    Eagle3Head.for_target(target, torch.arange(V)).save(other.path)
    names = other.tensors().keys()
    assert "d2t" not in names and "t2d" not in names
    assert other.config()["draft_vocab_size"] == V
    assert torch.equal(other.load().draft_ids, torch.arange(V))


@pytest.mark.parametrize("taps", [(1, 3, 6), (4,), (0, 8)])
def test_other_taps_are_written_in_both_numberings(
    taps: tuple[int, ...], target: Target, draft_ids: Tensor, other: Any
) -> None:
    Eagle3Head.for_target(target, draft_ids, taps=taps).save(other.path)
    config = other.config()
    assert config["eagle_aux_hidden_state_layer_ids"] == list(taps)
    nested = config["eagle_config"]
    assert nested["eagle_aux_hidden_state_layer_ids"] == [t - 1 for t in taps]
    assert nested["use_aux_hidden_state"] is True
    assert config.get("num_aux_hidden_states") == (None if len(taps) == 3 else len(taps))
    assert Eagle3Head.load(other.path).taps == taps


def test_default_taps_that_are_named_are_not_written(
    target: Target, draft_ids: Tensor, other: Any
) -> None:
    Eagle3Head.for_target(target, draft_ids, taps=(2, 4, 5)).save(other.path)
    assert "eagle_aux_hidden_state_layer_ids" not in other.config()
    assert "eagle_config" not in other.config()


def test_taps_of_the_config_and_of_the_caller(saved: Any) -> None:
    with pytest.raises(HeadsmithError, match="names no taps"):
        Eagle3Head.load(saved.path)
    assert Eagle3Head.load(saved.path, taps=(0, 1, 2)).taps == (0, 1, 2)
    saved.change_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 4, 6]})
    assert saved.load().taps == (3, 4, 6)
    saved.change_config(eagle_aux_hidden_state_layer_ids=[1, 2, 7])
    assert saved.load().taps == (1, 2, 7)
