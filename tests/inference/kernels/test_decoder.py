"""The decoder with the kernels under the interpreter: the tokens of the reference path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from headsmith.inference.engine import Decoder
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.records import Request
from headsmith.inference.tree import Chain, DynamicTree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

VOCAB = 80


@pytest.fixture(scope="module")
def target(tiny_tokenizer: Any, make_llama: Callable[..., LlamaForCausalLM]) -> Target:
    """2 blocks in float32, groups of 2 heads, no stop id."""
    model = make_llama(
        seed=5,
        num_hidden_layers=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Target(model, tiny_tokenizer, "small")


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (3, 11)]
    return [Request(f"r{i}", "task", ids) for i, ids in enumerate(prompts)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, Chain(3), DynamicTree(6, 3, 3)], ids=str)
def test_same_tokens_as_the_references(
    shape: Chain | DynamicTree | None,
    target: Target,
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headsmith.inference.kernels import compaction_triton, tree_attention_launch

    # A head that proposes what the target just said: some drafts are accepted, most are not.
    head = Eagle3Head.for_target(target, torch.arange(VOCAB), taps=(0, 1, 2))
    calls = {"attend": 0, "compact": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return run

    for name, module in (("attend", tree_attention_launch), ("compact", compaction_triton)):
        monkeypatch.setattr(module, "launch", counted(name, module.launch))
    found = []
    for wish in ("off", "on"):
        monkeypatch.setenv("HEADSMITH_KERNELS", wish)
        drafter = None if shape is None else make_drafter(head, target, shape)
        decoder = Decoder(target, drafter, batch=2, max_new_tokens=5)
        found.append([r.output_ids for r in decoder.generate(requests)[0]])
        assert (calls["attend"] > 0) == (wish == "on")
    assert found[0] == found[1]
    assert all(len(ids) == 5 for ids in found[0])
