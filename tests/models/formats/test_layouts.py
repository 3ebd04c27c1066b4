"""What is written for each engine: exactly the keys, tensors and shapes of the lists in
spec/eagle.md 5.1-5.7 and spec/medusa.md 1.3-1.5, written out here once more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headsmith.models.formats.export import export
from headsmith.models.target import Target

H, INNER, V, VD, D, L = 64, 96, 300, 48, 16, 8
NATIVE_ENGINES = ["vllm", "sglang", "trtllm", "eagle"]


def tensors_of(layer: str, taps: int = 3, fc_norm: bool = False) -> dict[str, list[int]]:
    shapes = {
        "fc.weight": [H, taps * H],
        f"{layer}.hidden_norm.weight": [H],
        f"{layer}.input_layernorm.weight": [H],
        f"{layer}.self_attn.q_proj.weight": [4 * D, 2 * H],
        f"{layer}.self_attn.k_proj.weight": [2 * D, 2 * H],
        f"{layer}.self_attn.v_proj.weight": [2 * D, 2 * H],
        f"{layer}.self_attn.o_proj.weight": [H, 4 * D],
        f"{layer}.post_attention_layernorm.weight": [H],
        f"{layer}.mlp.gate_proj.weight": [INNER, H],
        f"{layer}.mlp.up_proj.weight": [INNER, H],
        f"{layer}.mlp.down_proj.weight": [H, INNER],
        "norm.weight": [H],
        "lm_head.weight": [VD, H],
        "d2t": [VD],
        "t2d": [V],
    }
    return shapes | ({f"fc_norm.{i}.weight": [H] for i in range(taps)} if fc_norm else {})


def layer_config(target: Target) -> dict[str, Any]:
    """What both layouts say of the decoder layer."""
    return {
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": INNER,
        "head_dim": D,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "hidden_act": "silu",
        "rms_norm_eps": target.config.rms_norm_eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": target.config.bos_token_id,
        "eos_token_id": target.config.eos_token_id,
    }


def native_config(target: Target) -> dict[str, Any]:
    return layer_config(target) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VD,
        "rope_scaling": None,
        "attention_dropout": 0.0,
        "use_cache": True,
        "initializer_range": target.config.initializer_range,
    }


def written(folder: Path, file: str = "model.safetensors") -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json, and the shapes of the tensors."""
    shapes = {name: list(t.shape) for name, t in load_file(folder / file).items()}
    return json.loads((folder / "config.json").read_text()), shapes


@pytest.mark.parametrize("engine", NATIVE_ENGINES)
def test_default_taps_are_named_nowhere(
    engine: str, eagle: Callable[..., Path], target: Target, tmp_path: Path
) -> None:
    export(eagle(), engine, tmp_path / "out")
    config, shapes = written(tmp_path / "out")
    assert config == native_config(target)
    assert shapes == tensors_of("midlayer")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_other_taps_are_named_in_both_numberings(
    engine: str, eagle: Callable[..., Path], target: Target, tmp_path: Path
) -> None:
    export(eagle("eagle3.1", taps=(1, 3, 6)), engine, tmp_path / "out")
    config, shapes = written(tmp_path / "out")
    assert config == native_config(target) | {
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 2, 5],
            "use_aux_hidden_state": True,
        },
    }
    assert shapes == tensors_of("midlayer", fc_norm=True)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_vllm_alone_is_told_how_many_taps_there_are(
    engine: str, eagle: Callable[..., Path], tmp_path: Path
) -> None:
    export(eagle(taps=(1, 3, 5, 6)), engine, tmp_path / "out")
    config, shapes = written(tmp_path / "out")
    assert config.get("num_aux_hidden_states") == (4 if engine == "vllm" else None)
    assert shapes == tensors_of("midlayer", taps=4)


@pytest.mark.parametrize("taps", [None, (1, 3, 6), (0, 2, 4, 8)])
def test_speculators(
    taps: tuple[int, ...] | None,
    eagle: Callable[..., Path],
    target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    export(eagle("eagle3.1", taps=taps, draft="chain:5"), "speculators", tmp_path / "out")
    config, shapes = written(tmp_path / "out")
    body = layer_config(target)
    if taps is not None and len(taps) != 3:
        body["num_aux_hidden_states"] = len(taps)
    assert config == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": VD,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(taps or (2, 4, 5)),
        "transformer_layer_config": body,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": str(tiny_target_dir),
                "architectures": ["LlamaForCausalLM"],
            },
        },
    }
    assert shapes == tensors_of("layers.0", taps=len(taps or (2, 4, 5)), fc_norm=True)


@pytest.mark.parametrize("engine", [*NATIVE_ENGINES, "speculators"])
def test_the_whole_vocabulary_is_written_without_a_mapping(
    engine: str, eagle: Callable[..., Path], tmp_path: Path
) -> None:
    export(eagle(ids=torch.arange(V)), engine, tmp_path / "out")
    config, shapes = written(tmp_path / "out")
    assert config["draft_vocab_size"] == V and shapes["lm_head.weight"] == [V, H]
    assert not {"d2t", "t2d"} & set(shapes)


@pytest.mark.parametrize("engine", [*NATIVE_ENGINES, "speculators"])
def test_types_of_what_is_written(
    engine: str, eagle: Callable[..., Path], draft_ids: Tensor, tmp_path: Path
) -> None:
    export(eagle(), engine, tmp_path / "out", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(VD) + tensors["d2t"], draft_ids)
    rest = {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")}
    assert rest == {torch.bfloat16}
    config = json.loads((tmp_path / "out/config.json").read_text())
    body = config.get("transformer_layer_config", config)
    assert body["torch_dtype"] == "bfloat16"


BLOCKS_A = {
    f"{i}.0.linear.{part}": shape
    for i in range(3)
    for part, shape in (("weight", [H, H]), ("bias", [H]))
}


def test_tgi_borrows_a_shared_lm_head_and_takes_private_ones(
    medusa: Callable[..., Path], tiny_target_dir: Path, tmp_path: Path
) -> None:
    config = {
        "base_model_name_or_path": str(tiny_target_dir),
        "medusa_num_heads": 3,
        "medusa_num_layers": 1,
    }
    export(medusa("shared"), "tgi", tmp_path / "shared")
    found = written(tmp_path / "shared", "medusa_lm_head.safetensors")
    assert found == (config | {"version": "2"}, BLOCKS_A)
    export(medusa("private"), "tgi", tmp_path / "private")
    found = written(tmp_path / "private", "medusa_lm_head.safetensors")
    assert found == (config, BLOCKS_A | {f"{i}.1.weight": [V, H] for i in range(3)})


@pytest.mark.parametrize("lm_head", ["shared", "private"])
def test_tensorrt_llm_has_a_lm_head_for_every_head(
    lm_head: str, medusa: Callable[..., Path], tiny_target_dir: Path, tmp_path: Path
) -> None:
    export(medusa(lm_head), "trtllm", tmp_path / "out")
    config, shapes = written(tmp_path / "out", "medusa_lm_head.safetensors")
    assert config == {
        "base_model_name_or_path": str(tiny_target_dir),
        "medusa_num_heads": 3,
        "num_medusa_heads": 3,
        "medusa_num_layers": 1,
        "max_draft_len": 3,
    }
    assert shapes == BLOCKS_A | {f"{i}.1.weight": [V, H] for i in range(3)}


@pytest.mark.parametrize("lm_head", ["shared", "private", "truncated"])
@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_heads_for_vllm(
    lm_head: str, layers: int, medusa: Callable[..., Path], tmp_path: Path
) -> None:
    export(medusa(lm_head, layers), "vllm", tmp_path / "out")
    config, shapes = written(tmp_path / "out")
    size = VD if lm_head == "truncated" else V
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "num_heads": 3,
        "num_hidden_layers": layers,
        "truncated_vocab_size": size,
        "original_lm_head": lm_head != "private",
        "medusa_fc_bias": True,
        "torch_dtype": "float32",
    }
    blocks = {
        f"blocks.{i}.layers.{j}.{part}": shape
        for i in range(3)
        for j in range(layers)
        for part, shape in (("weight", [H, H]), ("bias", [H]))
    }
    rows = {
        "shared": {"lm_head.weight": [V, H]},
        "private": {f"lm_heads.{i}.weight": [V, H] for i in range(3)},
        "truncated": {"lm_head.weight": [VD, H], "token_map": [VD]},
    }[lm_head]
    assert shapes == blocks | rows


def test_two_layers_of_shared_heads_are_written_out_for_tgi(
    medusa: Callable[..., Path], tmp_path: Path
) -> None:
    """Without a lm_head of their own it takes heads of one layer only."""
    export(medusa("shared", layers=2), "tgi", tmp_path / "out")
    config, shapes = written(tmp_path / "out", "medusa_lm_head.safetensors")
    assert "version" not in config and config["medusa_num_layers"] == 2
    assert {name for name in shapes if ".linear." not in name} == {
        f"{i}.2.weight" for i in range(3)
    }
