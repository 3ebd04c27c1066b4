"""The EAGLE drafter: its cache after any history, and its trees against a beam search by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headsmith.inference.drafters import EagleDrafter, Update
from headsmith.inference.engine import Decoder
from headsmith.inference.records import Request
from headsmith.inference.tree import Chain, DynamicTree, Shape, Tree
from headsmith.models.eagle3 import Eagle3Head, rotate
from headsmith.models.eagle3_config import KINDS, Eagle3Config
from headsmith.models.target import Target

TAPS = (1, 3)


# The last kind is trained by others only.
FLAGS = {**KINDS, "norms of others": ("norm_before_fc", "norm_before_residual")}


@pytest.fixture(scope="module", params=FLAGS)
def head(request: pytest.FixtureRequest, small_target: Target) -> Eagle3Head:
    """A random head with opinions, in float64; it drafts every third id."""
    vocabulary = torch.arange(0, small_target.vocab_size, 3)
    config = Eagle3Config.for_target(small_target, len(vocabulary), taps=TAPS)
    flags: dict[str, Any] = dict.fromkeys(FLAGS[request.param], True)
    head = Eagle3Head(replace(config, **flags), vocabulary).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in head.parameters():
            if p.ndim == 2:
                p.normal_(0.0, 0.3, generator=generator)
    return head.requires_grad_(False)


class Watched(EagleDrafter):
    """Drafts with the head, but tells the truth for as long as `truth` says, so that passes accept
    a different number each; compares its cache with a prefill from scratch at every pass.
    """

    def __init__(self, head: Eagle3Head, target: Target, shape: Shape, truth: object) -> None:
        super().__init__(head, target, shape)
        self.truth = truth
        self.history: dict[int, list[Update]] = {}
        self.compared = 0

    def release(self, slot: int) -> None:
        super().release(slot)
        self.history.pop(slot)
        self.truth.release(slot)  # type: ignore[attr-defined]

    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        trees = super().propose(updates)
        for update, tree in zip(updates, trees, strict=True):
            self.history.setdefault(update.slot, []).append(update)
            self.compare(update.slot, tree)
        return self.truth.propose(updates)  # type: ignore[attr-defined]

    def compare(self, slot: int, tree: Tree) -> None:
        past = self.history[slot]
        tokens = [t for u in past for t in u.tokens]
        scratch = EagleDrafter(self.head, self.target, self.shape)
        scratch.reset(1, len(tokens) + 60)
        (expected,) = scratch.propose([Update(0, tokens, torch.cat([u.taps for u in past]))])
        assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
        assert self._lengths[slot] == len(tokens)
        for mine, fresh in zip(self.cache._layers[0], scratch.cache._layers[0], strict=True):
            rows = mine[slot, :, : len(tokens)], fresh[0, :, : len(tokens)]
            torch.testing.assert_close(*rows, rtol=0, atol=1e-10)
        self.compared += 1


@pytest.mark.parametrize("shape", [Chain(4), DynamicTree(9, 3, 3)])
def test_the_cache_is_that_of_a_prefill_from_scratch(
    shape: Shape,
    small_target: Target,
    head: Eagle3Head,
    requests: list[Request],
    knowing: SimpleNamespace,
) -> None:
    """After accepted and rejected drafts, in shared batches and in slots that are used again."""
    truth = knowing.Scripted(Chain(4))
    truth.taps = TAPS
    drafter = Watched(head, small_target, shape, truth)
    responses, _ = Decoder(small_target, drafter, batch=2, max_new_tokens=9).generate(requests)
    assert drafter.compared == sum(len(r.passes) for r in responses)
    assert {p.accepted for r in responses for p in r.passes} >= {0, 1, 2}


def layer_output(head: Eagle3Head, target: Target, rows: list[tuple[int, Tensor, int]]) -> Tensor:
    """The head's g at the last of the rows (token, state, position), attention written out."""
    layer, d = head.midlayer, head.config.head_dim
    states = torch.stack([state for _, state, _ in rows])
    u = layer.inputs(head.embed(target, torch.tensor([token for token, _, _ in rows])), states)
    cos, sin = head.cos_sin(torch.tensor([position for _, _, position in rows]))
    split = [
        m(u).view(len(rows), -1, d).transpose(0, 1)
        for m in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    ]
    q, k, v = rotate(split[0], cos, sin), rotate(split[1], cos, sin), split[2]
    group = q.shape[0] // k.shape[0]
    out = [
        ((k[h // group] @ q[h, -1]) / d**0.5).softmax(-1) @ v[h // group] for h in range(q.shape[0])
    ]
    residual = layer.hidden_norm(states[-1]) if head.config.norm_before_residual else states[-1]
    r = residual + layer.self_attn.o_proj(torch.cat(out))
    return r + layer.mlp(layer.post_attention_layernorm(r))


def beam_by_hand(
    head: Eagle3Head, target: Target, update: Update, shape: DynamicTree
) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree, one path at a time, in Python (spec/eagle.md 6.3)."""
    z = head.fuse(update.taps)
    rows = [(token, z[i], i) for i, token in enumerate(update.tokens)]

    def expand(path: list[tuple[int, Tensor, int]]) -> tuple[list[tuple[float, int]], Tensor]:
        g = layer_output(head, target, [*rows, *path])
        logp = head.logits(g).log_softmax(-1)
        best = sorted(range(len(logp)), key=lambda i: (-float(logp[i]), i))[: shape.topk]
        return [(float(logp[i]), int(head.draft_ids[i])) for i in best], head.feedback(g)

    # Candidates: score, token, parent number. Frontier: candidate number, its path of rows.
    candidates: list[tuple[float, int, int]] = []
    frontier: list[tuple[int, list[tuple[int, Tensor, int]]]] = [(-1, [])]
    for level in range(shape.depth):
        new: list[tuple[int, list[tuple[int, Tensor, int]]]] = []
        for parent, path in frontier:
            base = candidates[parent][0] if parent >= 0 else 0.0
            children, state = expand(path)
            for logp, token in children:
                row = (token, state, len(rows) + level)
                new.append((len(candidates), [*path, row]))
                candidates.append((base + logp, token, parent))
        new.sort(key=lambda item: (-candidates[item[0]][0], item[0]))
        frontier = new[: shape.topk]
    order = sorted(range(len(candidates)), key=lambda i: (-candidates[i][0], i))
    chosen = sorted(order[: shape.nodes])
    place = {-1: 0} | {candidate: i + 1 for i, candidate in enumerate(chosen)}
    tokens = [update.tokens[-1], *(candidates[i][1] for i in chosen)]
    return tokens, [-1, *(place[candidates[i][2]] for i in chosen)]


SHAPES = [DynamicTree(1, 1, 1), DynamicTree(5, 1, 5), DynamicTree(6, 3, 2), DynamicTree(12, 4, 4)]


@pytest.mark.parametrize("shape", [*SHAPES, DynamicTree(99, 3, 3), DynamicTree(7, 50, 1)], ids=str)
def test_trees_equal_a_beam_search_by_hand(
    shape: DynamicTree, small_target: Target, head: Eagle3Head, requests: list[Request]
) -> None:
    drafter = EagleDrafter(head, small_target, shape)
    updates = []
    for slot, request in enumerate(requests[:3]):
        ids = torch.tensor(request.prompt_ids)
        taps = small_target.features(ids, [len(ids)], TAPS).taps.clone()
        updates.append(Update(slot, [*request.prompt_ids[1:], 7], taps))
    drafter.reset(3, 40 + shape.topk * shape.depth)
    for update, tree in zip(updates, drafter.propose(updates), strict=True):
        tokens, parents = beam_by_hand(head, small_target, update, shape)
        assert (tree.tokens, tree.parents) == (tokens, parents)
        check_invariants(tree, shape, head)


def check_invariants(tree: Tree, shape: DynamicTree, head: Eagle3Head) -> None:
    k = min(shape.topk, head.config.draft_vocab_size)
    assert len(tree) - 1 == min(shape.nodes, k + (shape.depth - 1) * k * k)
    assert tree.depth <= shape.depth
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert tree.ancestors.sum(1).tolist() == [depth + 1 for depth in tree.depths]
    for children in tree.children:
        tokens = [tree.tokens[c] for c in children]
        assert len(set(tokens)) == len(tokens) <= shape.topk
    assert set(tree.tokens[1:]) <= set(head.draft_ids.tolist())


def test_a_chain_is_the_likeliest_path(
    small_target: Target, head: Eagle3Head, requests: list[Request]
) -> None:
    ids = torch.tensor(requests[1].prompt_ids)
    taps = small_target.features(ids, [len(ids)], TAPS).taps.clone()
    update = Update(0, [*requests[1].prompt_ids[1:], 7], taps)
    drafter = EagleDrafter(head, small_target, Chain(5))
    drafter.reset(1, 40)
    (chain,) = drafter.propose([update])
    tokens, parents = beam_by_hand(head, small_target, update, DynamicTree(5, 1, 5))
    assert (chain.tokens, chain.parents) == (tokens, parents) and chain.is_chain


def test_drafting_leaves_the_head_as_it_was(small_target: Target, head: Eagle3Head) -> None:
    """The drafter works on a copy: a head that is being trained stays trainable."""
    trained = copy.deepcopy(head).requires_grad_(True).train()
    drafter = EagleDrafter(trained, small_target, Chain(2))
    assert trained.training and all(p.requires_grad for p in trained.parameters())
    assert not any(p.requires_grad for p in drafter.head.parameters())
    assert drafter.taps == TAPS
