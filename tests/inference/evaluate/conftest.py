"""A target, a head and prompts in folders, and settings that measure them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from headsmith.inference.settings import EvalSettings
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target


@pytest.fixture(scope="session")
def folders(
    tiny_tokenizer: Any,
    make_llama: Callable[..., LlamaForCausalLM],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path, Path]:
    """A target, a head whose lm_head is the target's, and prompts of which one has two turns."""
    root = tmp_path_factory.mktemp("eval")
    model = make_llama(
        seed=3,
        num_hidden_layers=7,
        vocab_size=len(tiny_tokenizer),
        max_position_embeddings=160,
        initializer_range=0.2,
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
    )
    model.save_pretrained(root / "target")
    tiny_tokenizer.save_pretrained(root / "target")
    target = Target.load(root / "target")
    vocabulary = torch.arange(target.vocab_size)
    Eagle3Head.for_target(target, vocabulary).save(root / "head")
    rows = [
        {"prompt": "red green", "task": "colours"},
        {"turns": ["one two", "three"], "task": "numbers"},
        {"prompt": "blue", "task": "colours"},
    ]
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root / "target", root / "head", prompts


@pytest.fixture
def settings(folders: tuple[Path, Path, Path]) -> EvalSettings:
    target, head, prompts = folders
    return EvalSettings(
        target=str(target), head=str(head), prompts=str(prompts), max_new_tokens=8, device="cpu"
    )
