"""The text equals what transformers' own `generate(do_sample=False)` gives, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headsmith.inference.drafters import EagleDrafter
from headsmith.inference.engine import Decoder
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.records import Request
from headsmith.inference.tree import parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

TASKS = ["mt_bench", "humaneval", "gsm8k"]
COUNT, NEW_TOKENS = 2, 32


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target.load(target_dir)


@pytest.fixture(scope="module")
def requests(target: Target, shared_dir: Path) -> list[Request]:
    """The first turns of the first prompts of each task."""
    folder = shared_dir / "prompts"
    if not folder.is_dir():
        pytest.skip(f"no prompts in {folder}")
    builder = RequestBuilder(target.tokenizer, target.max_context)
    conversations = load_prompts(",".join(TASKS), data_dir=folder, limit=COUNT)
    return [builder.build(c) for c in conversations]


@pytest.fixture(scope="module")
def expected(target_dir: Path, requests: list[Request]) -> list[list[int]]:
    """With the model's own attention and cache: another model object, none of our code."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    outputs = []
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        outputs.append(out[0, ids.shape[1] :].tolist())
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shape", ["chain:4", "tree:24,4,5"])
def test_equals_generate(
    batch: int,
    shape: str,
    target: Target,
    shared_dir: Path,
    requests: list[Request],
    expected: list[list[int]],
) -> None:
    folder = shared_dir / "golden" / "eagle31-native"
    if not folder.is_dir():
        pytest.skip(f"no reference head in {folder}")
    head = Eagle3Head.load(folder, num_target_layers=target.num_layers)
    drafter = EagleDrafter(head, target, parse_shape(shape))
    decoder = Decoder(target, drafter, batch=batch, max_new_tokens=NEW_TOKENS)
    responses, _ = decoder.generate(requests)
    assert [r.output_ids for r in responses] == expected
