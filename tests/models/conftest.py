"""Tiny random targets of several families, written as folders, and the folder of a head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    # Scores and logits capped, every other layer windowed, embeddings scaled.
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "sliding_window": 5,
    },
    # Norms of queries and keys, heads wider than H / h.
    "qwen3": {"head_dim": 16, "attention_bias": False},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
    },
}


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random model of 6 blocks, H 32 and 270 ids."""
    from transformers import AutoConfig

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
    arguments = {"model_type": family, **sizes, **FAMILIES[family], **changes}
    config = AutoConfig.for_model(**arguments)
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(config)


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
