"""Tiny random targets of several families, written as folders, and the folder of a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from headsmith.models.target import Target

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
# Keys and values from one latent row, values of another size than keys, a rotary part beside.
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_EVERY_OTHER = ["sliding_attention", "full_attention"] * 3

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "multi-query": {"model_type": "llama", "num_key_value_heads": 1, "eos_token_id": [257, 9, 4]},
    "mistral": {"sliding_window": 4},
    # Biases of queries, keys and values; the last blocks windowed.
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
    # Norms of queries and keys, heads wider than H / h.
    "qwen3": {"head_dim": 16, "attention_bias": False},
    # Scores and logits capped, every other layer windowed, embeddings scaled.
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "sliding_window": 5,
    },
    # Two layouts of RoPE, one with a factor; tied.
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "layer_types": _EVERY_OTHER,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
    # One matrix for queries, keys and values, half of their dimensions rotated.
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": 4},
    # Other names for everything, LayerNorm with biases, attention and MLP side by side.
    "gpt_neox": {"num_key_value_heads": None, "rotary_pct": 0.25},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    # A learned sink beside the scores of each head.
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "rope_parameters": {**_YARN, "mscale": None, "mscale_all_dim": None},
    },
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "rope_parameters": _YARN},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 16, "n_group": 2, "topk_group": 1},
    # Learned positions and one key/value head by construction.
    "gpt_bigcode": {"num_key_value_heads": None, "intermediate_size": None, "n_inner": 48},
    # Scaled embeddings, residuals and logits.
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    # Norms behind attention and MLP instead of before them.
    "olmo2": {},
    # Layers without positions, scaled logits, one norm for attention and MLP.
    "cohere2": {"logit_scale": 0.5, "sliding_window": 4, "layer_types": _EVERY_OTHER},
}


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """The config of a model of 6 blocks, H 32 and 270 ids."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 270,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    return AutoConfig.for_model(**{"model_type": family, **sizes, **FAMILIES[family], **changes})


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random model of `tiny_config`."""
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(tiny_config(family, **changes))


@dataclass(slots=True)
class Case:
    """A target of one family, and the same weights as transformers runs them by itself."""

    family: str
    folder: Path
    target: Target
    own: PreTrainedModel


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any
) -> Case:
    """Every family in turn."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return Case(request.param, folder, Target.load(folder), own)


@pytest.fixture
def write_target(tmp_path: Path, tiny_tokenizer: Any) -> Callable[..., Path]:
    """write_target(model, name="target", tokenizer=None, **save_pretrained arguments) -> folder."""

    def write(
        model: PreTrainedModel, name: str = "target", tokenizer: Any = None, **arguments: Any
    ) -> Path:
        folder = tmp_path / name
        model.save_pretrained(folder, **arguments)
        (tokenizer or tiny_tokenizer).save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """make_model(family, **config changes); families are in FAMILIES."""
    return tiny_model


@pytest.fixture(scope="session")
def make_config() -> Callable[..., PretrainedConfig]:
    """make_config(family, **changes)."""
    return tiny_config


@pytest.fixture(scope="session")
def target(tiny_target_dir: Path) -> Target:
    """The target that heads are made for."""
    return Target.load(tiny_target_dir)


@pytest.fixture(scope="session")
def draft_ids() -> Tensor:
    """48 of the target's 300 ids."""
    generator = torch.Generator().manual_seed(1)
    return torch.randperm(300, generator=generator)[:48].sort().values
