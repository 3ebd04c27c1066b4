"""Drafting with Medusa heads (spec/medusa.md 3): every head ranks its tokens once a pass, and a
fixed tree of rank paths is filled with them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.drafters import Update
from headsmith.inference.kernels import takes
from headsmith.inference.rank_tree import build_tree
from headsmith.inference.ranking import ByKernel, is_bare
from headsmith.inference.stages import stage
from headsmith.inference.tree import Branches, Calibrated, Chain, Draft, RankTree, Shape, Tree
from headsmith.models.linear import pack_linears
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target


class MedusaDrafter:
    """Drafts with Medusa heads: chains of their best tokens, or a tree of rank paths.

    It remembers nothing of a request: the target's state of its last accepted token is all that
    the heads read, and they run on that one row only.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, head: MedusaHead, target: Target, shape: Draft) -> None:
        tree = tree_of(head, shape)
        # A copy, for packing would end a head that is still trained; of the shared lm_head none.
        kept = {} if head.shared is None else {id(head.shared): head.shared}
        self.head = copy.deepcopy(head, kept).to(target.device, target.dtype)
        self.head.requires_grad_(False).eval()
        # Kernels read the weights as they are.
        if not takes(target.head_weight):
            pack_linears(self.head)
        self.target, self.tree = target, tree
        self.shape: Shape = shape if isinstance(shape, Chain) else tree

    def reset(self, slots: int, capacity: int) -> None:
        """Nothing to forget."""

    def release(self, slot: int) -> None:
        """Nothing to forget."""

    @torch.inference_mode()
    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        states = [update.last for update in updates if update.last is not None]
        assert len(states) == len(updates), "Medusa heads read the last state of every request"
        tree = self.tree
        with stage("draft heads"):
            last = torch.stack(states)
            ranked = best_tokens(self.head, self.target, last, tree.depth, tree.ranks)
        return [
            Tree(
                [update.tokens[-1], *(best[len(path) - 1][path[-1]] for path in tree.paths)],
                tree.parents,
            )
            for update, best in zip(updates, ranked.tolist(), strict=True)
        ]


def best_tokens(head: MedusaHead, target: Target, last: Tensor, depth: int, ranks: int) -> Tensor:
    """The likeliest target ids of the first `depth` heads, best first: last [n, H] -> int64 [n,
    depth, ranks].
    """
    matrices = _matrices(head, target, depth)
    if matrices is None:
        return head.draft_ids[head_logits(head, target, last, depth).topk(ranks).indices]
    states = torch.stack([head.state(k, last) for k in range(depth)], 1)
    if len(matrices) == 1:
        return matrices[0].best(states, ranks)
    pairs = zip(matrices, states.unbind(1), strict=True)
    return torch.stack([matrix.best(mine, ranks) for matrix, mine in pairs], 1)


def _matrices(head: MedusaHead, target: Target, depth: int) -> list[ByKernel] | None:
    """Where the kernel can rank for the first `depth` heads: the one output matrix of all of them,
    or one each.
    """
    if not takes(target.head_weight) or not is_bare(target):
        return None
    if head.config.lm_head == "shared":
        return [ByKernel(target.head_weight)]
    own = head.own_lm_heads()[:depth]
    ready = len(own) > 0 and all(takes(module.weight) for module in own)
    return [ByKernel(module.weight, head.draft_ids) for module in own] if ready else None


def head_logits(head: MedusaHead, target: Target, last: Tensor, depth: int) -> Tensor:
    """Logits of the first `depth` heads: last [n, H] -> [n, depth, D]."""
    states = torch.stack([head.state(k, last) for k in range(depth)], 1)
    if head.config.lm_head == "private":
        parts = [head.logits(k, states[:, k], target) for k in range(depth)]
        return torch.stack(parts, 1)
    # One lm_head for all: one product, by the target's own packed weight if it is the target's.
    flat = states.flatten(0, 1)
    shared = head.config.lm_head == "shared"
    logits = target.logits(flat) if shared else head.logits(0, flat, target)
    return logits.view(len(last), depth, -1)


def tree_of(head: MedusaHead, shape: Draft) -> RankTree:
    """The rank paths that a shape means for this head; HeadsmithError if it has none."""
    depth = head.config.num_heads
    if isinstance(shape, Chain):
        tree = RankTree.chain(shape.depth)
    elif isinstance(shape, Calibrated):
        tree = _calibrated(head, shape)
    elif isinstance(shape, RankTree):
        tree = shape
    elif isinstance(shape, Branches):
        raise HeadsmithError(
            f"draft {shape} is a tree of draws, which only rule ratio at a temperature above 0 "
            "makes; give chain:DEPTH, stored or medusa:NODES"
        )
    else:
        raise HeadsmithError(
            f"draft {shape} needs a head that reads its own drafts, which Medusa heads do not; "
            "give chain:DEPTH, stored or medusa:NODES"
        )
    if tree.depth > depth:
        raise HeadsmithError(
            f"draft {shape} goes {tree.depth} drafts deep and there are {depth} Medusa heads; "
            f"draft at most {depth} deep"
        )
    if tree.ranks > head.config.draft_vocab_size:
        raise HeadsmithError(
            f"draft {shape} asks for {tree.ranks} tokens of a head and it can draft "
            f"{head.config.draft_vocab_size}; calibrate the head again"
        )
    return tree


def _calibrated(head: MedusaHead, shape: Calibrated) -> RankTree:
    stored = head.calibration
    if stored is None:
        raise HeadsmithError(
            f"draft {shape} needs a tree stored with the head, and it has none; run headsmith "
            "calibrate --head DIR first, or draft a chain"
        )
    if shape.nodes is not None:
        return build_tree(stored.accuracy, shape.nodes)
    return RankTree(tuple(tuple(path) for path in stored.choices))
