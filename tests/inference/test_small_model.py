"""A small model as drafter: its cache in step with the text, its trees, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from headsmith.errors import HeadsmithError
from headsmith.inference.drafters import Update
from headsmith.inference.engine import Decoder
from headsmith.inference.records import Request
from headsmith.inference.small_model import ModelDrafter
from headsmith.inference.tree import Calibrated, Chain, Draft, DynamicTree, RankTree, Tree
from headsmith.models.spans import Span
from headsmith.models.target import Target

Decode = Callable[..., Any]
RANKS = RankTree(((0,), (2,), (0, 0), (0, 1), (2, 1), (0, 1, 0), (2, 1, 1)))


def accepts_all(drafter: ModelDrafter, same_text: Decode, batch: int) -> bool:
    responses = same_text(drafter, batch, max_new_tokens=14)
    return all(p.accepted == drafter.shape.depth for r in responses for p in r.passes[:-1])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [Chain(1), Chain(4), RankTree(((0,), (1,), (0, 0), (0, 1)))])
def test_the_target_as_its_own_small_model_is_always_right(
    shape: Draft, batch: int, small_target: Target, same_text: Decode
) -> None:
    assert accepts_all(ModelDrafter(small_target, small_target, shape), same_text, batch)


class OutOfStep(ModelDrafter):
    """The bug: the root is left out of the cache's length."""

    def _extend(self, updates: Sequence[Update]) -> Tensor:
        first = super()._extend(updates)
        for update in updates:
            self._lengths[update.slot] -= 1
        return first


def test_a_cache_that_is_not_in_step_is_found(small_target: Target, same_text: Decode) -> None:
    """The text stays the target's own even so; what it costs are drafts."""
    assert not accepts_all(OutOfStep(small_target, small_target, Chain(4)), same_text, 3)


def best(target: Target, ids: list[int]) -> list[int]:
    """Ids by what a pass over the whole text says of the next, best first."""
    logits = target.logits(target.run(torch.tensor(ids), [Span(len(ids))]).last[-1:])[0]
    return logits.sort(descending=True, stable=True).indices.tolist()


@pytest.mark.parametrize("shape", [RANKS, DynamicTree(9, 3, 3), DynamicTree(60, 2, 4)])
def test_trees_hold_the_models_best_tokens_behind_every_path(
    shape: Draft, small_target: Target, requests: list[Request]
) -> None:
    drafter = ModelDrafter(small_target, small_target, shape)
    drafter.reset(2, 80)
    texts = {0: requests[1].prompt_ids, 1: requests[3].prompt_ids}
    drafter.propose(
        [
            Update(s, [*t[1:], 7], torch.empty(0), request=Request("", "", t))
            for s, t in texts.items()
        ]
    )
    # A second pass, whose first tokens lie over what the first one drafted.
    updates = [Update(0, [5, 9, 11], torch.empty(0)), Update(1, [4], torch.empty(0))]
    for update, tree in zip(updates, drafter.propose(updates), strict=True):
        text = [*texts[update.slot], 7, *update.tokens[:-1]]
        assert len(tree) - 1 == min(shape.nodes, 2 + 3 * 4) and tree.tokens[0] == update.tokens[-1]
        for node, children in enumerate(tree.children):
            if not children:
                continue
            path = [tree.tokens[i] for i in tree.ancestors[node].nonzero().flatten().tolist()]
            ranked = best(small_target, [*text, *path])
            if isinstance(shape, RankTree):
                wanted = [ranked[shape.paths[child - 1][-1]] for child in children]
            else:
                wanted = ranked[: len(children)]
            assert [tree.tokens[child] for child in children] == wanted


@pytest.fixture
def other(
    make_llama: Callable[..., LlamaForCausalLM], tiny_tokenizer: Any
) -> Callable[..., Target]:
    """other(vocab, context): a small model of its own."""

    def make(vocab: int, context: int = 256, tokenizer: Any = tiny_tokenizer) -> Target:
        model = make_llama(
            seed=1,
            num_hidden_layers=1,
            vocab_size=vocab,
            max_position_embeddings=context,
            eos_token_id=None,
        )
        return Target(model.double(), tokenizer, "other")

    return make


class Watched(ModelDrafter):
    """Remembers the largest id that it drafted."""

    largest = 0

    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        trees = super().propose(updates)
        self.largest = max(self.largest, *(t for tree in trees for t in tree.tokens[1:]))
        return trees


@pytest.mark.parametrize("vocab", [80, 120])
def test_vocabularies_may_be_padded(
    vocab: int, other: Callable[..., Target], small_target: Target, same_text: Decode
) -> None:
    """The target writes ids up to 95: a model of 80 is fed them and one of 120 drafts no more."""
    for shape in (Chain(3), DynamicTree(8, 3, 3)):
        drafter = Watched(other(vocab), small_target, shape)
        same_text(drafter, 3, max_new_tokens=14)
        assert 50 < drafter.largest < min(vocab, 96)


def test_a_text_beyond_the_models_context_has_no_drafts(
    other: Callable[..., Target], small_target: Target, requests: list[Request], same_text: Decode
) -> None:
    """spec/verifier.md 7, entry 6. A slot that is used again drafts again."""
    responses = same_text(ModelDrafter(other(96, 20), small_target, Chain(4)), 2, max_new_tokens=24)
    for response in responses:
        text = len(response.request.prompt_ids) + 1
        for one in response.passes:
            assert one.proposed == (4 if text + 4 <= 20 else 0)
            text += one.committed


def test_other_tokens_are_refused(
    other: Callable[..., Target], small_target: Target, tiny_tokenizer: Any
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["<extra>"])
    sentence = (
        "other has other tokens than the target small: 1 ids differ, the first 258, '<extra>'"
    )
    with pytest.raises(HeadsmithError, match=sentence):
        ModelDrafter(other(300, tokenizer=tokenizer), small_target, Chain(2))


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (Calibrated(), "draft stored cannot be filled by"),
        (RankTree(((99,),)), "asks for 100 tokens"),
    ],
)
def test_shapes_that_it_cannot_fill(shape: Draft, sentence: str, small_target: Target) -> None:
    with pytest.raises(HeadsmithError, match=sentence):
        ModelDrafter(small_target, small_target, shape)


def test_a_decoder_resets_it(small_target: Target, requests: list[Request]) -> None:
    decoder = Decoder(
        small_target, ModelDrafter(small_target, small_target, Chain(3)), batch=2, max_new_tokens=6
    )
    first, again = decoder.generate(requests)[0], decoder.generate(requests[::-1])[0][::-1]
    assert [(r.output_ids, r.passes) for r in first] == [(r.output_ids, r.passes) for r in again]
