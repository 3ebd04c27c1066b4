"""Any target: what headsmith reads of every family is what transformers computes, a head for it
trains, and the text that it drafts is the target's own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headsmith.inference.cache import KeyValueCache
from headsmith.inference.drafters import EagleDrafter
from headsmith.inference.engine import Decoder
from headsmith.inference.records import Request
from headsmith.inference.tree import parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.spans import Span
from headsmith.models.target import Target
from headsmith.train.batches import make_batches
from headsmith.train.begin import begin
from headsmith.train.features import Features
from headsmith.train.optimiser import build_optimisers
from headsmith.train.recipe import Recipe
from headsmith.train.step import Stepper, Unroll

LENGTHS = [14, 3, 9]
TAPS = (0, 2, 5, 6)
DRAFT_IDS = torch.arange(0, 264)
close = torch.testing.assert_close


def some_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


def final_norm(target: Target) -> nn.Module:
    return [m for m in target.decoder.children() if "Norm" in type(m).__name__][-1]


def run_own(own: PreTrainedModel, ids: Tensor) -> Any:
    with torch.no_grad():
        return own(ids[None], output_hidden_states=True, use_cache=False)


def test_packed_documents_equal_the_model_on_each_alone(case: Any) -> None:
    """Taps, last states and logits of a packed row are transformers' own, document by document."""
    target = case.target
    ids = some_ids(sum(LENGTHS))
    got = target.features(ids, LENGTHS, TAPS)
    assert got.taps.shape == (26, 4, 32) and got.last.shape == (26, 32)
    begin = 0
    for length in LENGTHS:
        part = slice(begin, begin + length)
        out = run_own(case.own, ids[part])
        for i, tap in enumerate(TAPS[:-1]):
            close(got.taps[part, i], out.hidden_states[tap][0], rtol=1e-4, atol=2e-5)
        # transformers gives the last state behind the final norm only; the norm of tap 6 is it.
        close(final_norm(target)(got.taps[part, 3]), got.last[part], rtol=1e-4, atol=2e-5)
        close(got.last[part], out.hidden_states[-1][0], rtol=1e-4, atol=2e-5)
        close(target.logits(got.last[part]), out.logits[0].float(), rtol=1e-4, atol=2e-5)
        begin += length


def test_a_shared_prefix_changes_nothing(case: Any) -> None:
    prefix = some_ids(9, seed=3)
    ids = torch.cat([torch.cat([prefix, some_ids(n, seed=n)]) for n in (4, 1, 7)])
    whole = case.target.features(ids, [13, 10, 16], TAPS)
    shared = case.target.features(ids, [13, 10, 16], TAPS, shared=9)
    close(shared.taps, whole.taps, rtol=1e-4, atol=2e-5)
    close(shared.last, whole.last, rtol=1e-4, atol=2e-5)


def test_cached_passes_equal_one_forward(case: Any) -> None:
    """Two requests: a prefill each, then pieces of one to three tokens, against transformers."""
    texts, cuts = (
        [some_ids(15, seed=8), some_ids(11, seed=9)],
        [(0, 6, 9, 10, 15), (0, 2, 5, 6, 11)],
    )
    cache = KeyValueCache(2, 16)
    found: list[list[Tensor]] = [[], []]
    for i in range(4):
        bounds = [(cut[i], cut[i + 1]) for cut in cuts]
        spans = [Span(end - begin, begin, slot) for slot, (begin, end) in enumerate(bounds)]
        ids = [text[begin:end] for text, (begin, end) in zip(texts, bounds, strict=True)]
        last = case.target.run(torch.cat(ids), spans, cache).last
        for slot, states in enumerate(last.split([len(piece) for piece in ids])):
            found[slot].append(states)
    for text, states in zip(texts, found, strict=True):
        expected = run_own(case.own, text).hidden_states[-1][0]
        close(torch.cat(states), expected, rtol=1e-4, atol=2e-5)


def test_the_default_head_is_a_llama_of_the_targets_widths(case: Any) -> None:
    head = Eagle3Head.for_target(case.target, DRAFT_IDS, taps=(1, 3, 5))
    config = head.config
    assert (config.hidden_size, config.num_heads, config.target_width) == (32, 4, 32)
    assert config.num_heads % config.num_kv_heads == 0
    cos, _ = head.cos_sin(torch.arange(3))
    assert cos.shape == (3, config.head_dim)
    assert not config.owns_embedding and head.embed_tokens is None
    # JSON has no tuples and no tensors: what is written is what is read.
    again = type(config).from_json(config.to_json("float32"), None, 6)
    assert again.rope == config.rope and again.head_dim == config.head_dim


def train_ten_steps(target: Target, head: Eagle3Head) -> list[float]:
    """The losses of ten optimiser steps over the same few random documents."""
    documents = [some_ids(n, seed=n).tolist() for n in (23, 31, 9)]
    columns = {"input_ids": documents, "loss_mask": [[0] + [1] * (len(d) - 1) for d in documents]}
    recipe = Recipe.model_validate(
        {
            "target": {"path": "x"},
            "data": {"source": "x", "max_length": 64, "row_tokens": 64},
            "train": {
                "tokens_per_step": 10**6,
                "epochs": 10,
                "unroll_steps": 3,
                "learning_rate": 2e-3,
                "warmup_ratio": 0.0,
            },
        }
    )
    batches = make_batches(Dataset.from_dict(columns).with_format("numpy"), recipe)
    features = Features(target, head, batches, keep=True)
    accelerator = Accelerator(cpu=True)
    begin(recipe.head, features, accelerator, print)
    model = Unroll(head, target, recipe.train)
    optimisers = build_optimisers(head, recipe.train)
    stepper = Stepper(accelerator, features, model, optimisers, recipe.train)
    return [stepper.run(step)[0]["loss"] for step in range(10)]


@pytest.fixture(scope="module")
def trained(case: Any) -> SimpleNamespace:
    """A head after ten steps, their losses, and what transformers answers to the prompts."""
    head = Eagle3Head.for_target(case.target, DRAFT_IDS, taps=(1, 3, 5), fc_norm=True)
    losses = train_ten_steps(case.target, head)
    answers = [generated(case.own, prompt) for prompt in PROMPTS]
    return SimpleNamespace(head=head, losses=losses, answers=answers)


@pytest.mark.slow
def test_ten_training_steps_lower_the_loss(trained: Any) -> None:
    assert len(trained.losses) == 10 and trained.losses[-1] < 0.9 * trained.losses[0]


PROMPTS = [some_ids(7, seed=21).tolist(), some_ids(12, seed=22).tolist()]
NEW_TOKENS = 12


def generated(own: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = own.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain:3", "tree:10,3,3"])
def test_drafted_text_equals_generate(case: Any, trained: Any, shape: str) -> None:
    drafter = EagleDrafter(trained.head, case.target, parse_shape(shape))
    decoder = Decoder(case.target, drafter, batch=2, max_new_tokens=NEW_TOKENS)
    requests = [Request(f"r{i}", "task", prompt) for i, prompt in enumerate(PROMPTS)]
    responses, _ = decoder.generate(requests)
    assert [r.output_ids for r in responses] == trained.answers
    assert sum(p.proposed for r in responses for p in r.passes) > 0


def test_each_of_several_ends_of_sequence_ends_a_text(make_model: Any, write_target: Any) -> None:
    """The stop ids are tokens that the text really comes to, the second before the first."""
    text = generated(make_model("multi-query", eos_token_id=None).eval(), PROMPTS[0])
    first, second = text[9], text[5]
    assert first not in text[:9] and second not in text[:5]
    folder = write_target(make_model("multi-query", eos_token_id=[first, second]))
    target = Target.load(folder)
    assert target.stop_ids == tuple(sorted((first, second)))
    assert set(target.stop_ids) <= set(target.always_drafted)
    own = AutoModelForCausalLM.from_pretrained(folder).eval()
    requests = [Request("r", "task", PROMPTS[0])]
    responses, _ = Decoder(target, max_new_tokens=NEW_TOKENS).generate(requests)
    assert responses[0].output_ids == generated(own, PROMPTS[0]) == text[:6]
    assert responses[0].finish_reason == "eos"


def test_the_text_of_a_target_that_also_sees(make_config: Any, write_target: Any) -> None:
    """A multimodal checkpoint is reached through its text config and its language model."""
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    text = make_config("gemma3").to_dict()
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    torch.manual_seed(5)
    folder = write_target(AutoModelForCausalLM.from_config(config))
    target = Target.load(folder)
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (6, 32, 270)
    ids = some_ids(11)
    out, got = run_own(own, ids), target.features(ids, [11], (2, 3))
    close(got.taps[:, 1], out.hidden_states[3][0], rtol=1e-4, atol=2e-5)
    close(target.logits(got.last), out.logits[0], rtol=1e-4, atol=2e-5)


def test_a_target_without_its_blocks_is_the_same_target(case: Any) -> None:
    """Training on stored features needs no more of it than this."""
    ends = Target.load(case.target.path, blocks=False)
    assert not ends.whole and not [
        m for m in ends.decoder.modules() if type(m) is nn.ModuleList and len(m)
    ]
    assert ends.fingerprint() == case.target.fingerprint()
    assert ends.num_layers == case.target.num_layers == 6
    assert ends.stop_ids == case.target.stop_ids
    assert torch.equal(ends.head_weight, case.target.head_weight)
    # The whole one's matrices are packed for inference, and a product's last bits depend on that.
    last, ids = torch.randn(5, 32), some_ids(7)
    for name, of_ends, of_whole in (
        ("logits", ends.logits(last), case.target.logits(last)),
        ("logits_of", ends.logits_of(last, ids), case.target.logits_of(last, ids)),
        ("final_norm", ends.final_norm(last), final_norm(case.target)(last)),
    ):
        torch.testing.assert_close(of_ends, of_whole, rtol=1e-5, atol=1e-6, msg=name)
    assert torch.equal(ends.embed(ids), case.target.embed(ids))
    with pytest.raises(AssertionError, match="without its blocks"):
        ends.run(ids, [Span(7)])
