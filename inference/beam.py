"""Trees of drafters that read their own drafts: a beam search, or fixed ranks, level by level.

Shapes: B requests, m nodes of a frontier, e of all frontiers before it, k children of a node, H
width of the states that are ranked.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headsmith.inference.kernels import use_kernels
from headsmith.inference.kernels.tree_build import (
    MOST_NODES,
    Candidates,
    Trees,
    build,
    grow,
)
from headsmith.inference.ranking import Ranking
from headsmith.inference.stages import stage
from headsmith.inference.tree import DynamicTree, RankTree, Tree, choose_nodes


class Expand(Protocol):
    """Runs drafted nodes behind their ancestors."""

    def __call__(self, tokens: Tensor, origins: Tensor, seen: Tensor, depths: Tensor) -> Tensor:
        """States [B, m, H] of the frontier's tokens, target ids int64 [B, m].

        `origins` int64 [B, m] says which node of the frontier before drafted each (the root of the
        first frontier is number 0); `seen` bool [B, m, e + m] marks each node's ancestors among all
        nodes run so far, itself included, and `depths` int64 [e + m] are theirs, 0 behind the root.
        """
        ...


def draft_trees(
    first: Tensor,
    expand: Expand,
    shape: DynamicTree | RankTree,
    roots: Sequence[int],
    ranking: Ranking,
) -> list[Tree]:
    """A tree for each request: first [B, H] are the states of the roots, and `ranking` says which
    ids are likely behind a state.
    """
    if isinstance(shape, RankTree):
        return _fixed_ranks(first, expand, shape, roots, ranking)
    if use_kernels(first.device) and shape.nodes < MOST_NODES:
        return _beam_by_kernels(first, expand, shape, roots, ranking)
    return _beam_search(first, expand, shape, roots, ranking)


def _beam_search(
    first: Tensor, expand: Expand, shape: DynamicTree, roots: Sequence[int], ranking: Ranking
) -> list[Tree]:
    """Expand the k likeliest of each level, then keep the likeliest nodes of all levels
    (spec/eagle.md 6.3).
    """
    batch, k = len(roots), min(shape.topk, ranking.size)
    own = torch.eye(k, dtype=torch.bool, device=first.device).expand(batch, k, k)
    with stage("draft lm_head"):
        scores, tokens = ranking.scored(first, k)
    origins = torch.zeros_like(tokens)
    levels = [(tokens, scores, torch.full_like(tokens, -1))]
    numbers = torch.arange(k, device=first.device).expand(batch, k)
    seen, start = own, k
    for level in range(shape.depth - 1):
        depths = torch.arange(level + 1).repeat_interleave(k)
        states = expand(tokens, origins, seen, depths)
        with stage("draft lm_head"):
            logp, children = ranking.scored(states, k)
        with stage("tree build"):
            logp, children = (scores[:, :, None] + logp).flatten(1), children.flatten(1)
            levels.append((children, logp, numbers.repeat_interleave(k, 1)))
            scores, chosen = logp.topk(k)
            tokens, origins = children.gather(1, chosen), chosen // k
            kept = seen.gather(1, origins[:, :, None].expand(-1, -1, seen.shape[-1]))
            seen = torch.cat([kept, own], -1)
            numbers, start = start + chosen, start + k * k
    with stage("tree build"):
        ids, scores, parents = (torch.cat(column, 1) for column in zip(*levels, strict=True))
        return [
            choose_nodes(ids[i], scores[i], parents[i], root, shape.nodes)
            for i, root in enumerate(roots)
        ]


def _beam_by_kernels(
    first: Tensor, expand: Expand, shape: DynamicTree, roots: Sequence[int], ranking: Ranking
) -> list[Tree]:
    """The same, a launch for each level and one for the trees; the host reads once, at the end."""
    ends = torch.tensor(roots, device=first.device)
    trees = grow_trees(first, expand, shape, ends, torch.zeros_like(ends), ranking)
    with stage("tree build"):
        rows = torch.stack([trees.tokens, trees.parents.long()], 1).tolist()
    return [Tree(tokens, parents) for tokens, parents in rows]


def grow_trees(
    first: Tensor,
    expand: Expand,
    shape: DynamicTree,
    roots: Tensor,
    lengths: Tensor,
    ranking: Ranking,
) -> Trees:
    """Trees of a beam by the device alone: roots int64 [B] and their positions int64 [B]."""
    device, batch, k = first.device, len(roots), min(shape.topk, ranking.size)
    own = torch.eye(k, dtype=torch.bool, device=device).expand(batch, k, k)
    found = Candidates.empty(batch, k, shape.depth, device)
    with stage("draft lm_head"):
        logp, ids = ranking.scored(first[:, None], k)
    with stage("tree build"):
        frontier, seen = grow(ids, logp, None, found, 0), own
    for level in range(1, shape.depth):
        depths = torch.arange(level * k, device=device) // k
        states = expand(frontier.tokens, frontier.origins, seen, depths)
        with stage("draft lm_head"):
            logp, ids = ranking.scored(states, k)
        with stage("tree build"):
            frontier = grow(ids, logp, frontier, found, level)
            kept = seen.gather(1, frontier.origins[:, :, None].expand(-1, -1, seen.shape[-1]))
            seen = torch.cat([kept, own], -1)
    with stage("tree build"):
        return build(found, roots, lengths, shape.nodes)


def _fixed_ranks(
    first: Tensor, expand: Expand, shape: RankTree, roots: Sequence[int], ranking: Ranking
) -> list[Tree]:
    """Fill the paths of ranks; only nodes with children are run."""
    device, skeleton = first.device, Tree([0] * (shape.nodes + 1), shape.parents)
    tokens = [torch.tensor(roots, device=device)]
    # For each node that was run, the target ids behind it, best first [B, ranks].
    with stage("draft lm_head"):
        best = {0: ranking.best(first, shape.ranks)}
    before, run = [0], []
    for depth in range(1, shape.depth + 1):
        level = [node for node, d in enumerate(skeleton.depths) if d == depth]
        tokens += [best[shape.parents[n]][:, shape.paths[n - 1][-1]] for n in level]
        frontier = [node for node in level if skeleton.children[node]]
        if not frontier:
            break
        run += frontier
        origins = torch.tensor([before.index(shape.parents[n]) for n in frontier], device=device)
        seen = skeleton.ancestors[frontier][:, run].to(device)
        states = expand(
            torch.stack([tokens[n] for n in frontier], 1),
            origins.expand(len(roots), -1),
            seen.expand(len(roots), -1, -1),
            torch.tensor([skeleton.depths[n] - 1 for n in run]),
        )
        with stage("draft lm_head"):
            ranked = ranking.best(states, shape.ranks)
        best |= {node: ranked[:, i] for i, node in enumerate(frontier)}
        before = frontier
    rows = torch.stack(tokens, 1).tolist()
    return [Tree(row, shape.parents) for row in rows]
