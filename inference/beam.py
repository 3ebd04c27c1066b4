"""Trees of drafters that read their own drafts: a beam search, or fixed ranks, level by level.

Shapes: B requests, m nodes of a frontier, e of all frontiers before it, k children of a node, V ids
that can be drafted.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headsmith.inference.tree import DynamicTree, RankTree, Tree, choose_nodes


class Expand(Protocol):
    """Runs drafted nodes behind their ancestors."""

    def __call__(self, tokens: Tensor, origins: Tensor, seen: Tensor, depths: Tensor) -> Tensor:
        """Logits [B, m, V] behind the frontier's tokens, target ids int64 [B, m].

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
    ids: Tensor,
) -> list[Tree]:
    """A tree for each request: first [B, V] are the logits behind its root, ids int64 [V] the
    target ids of the columns.
    """
    if isinstance(shape, DynamicTree):
        return _beam_search(first, expand, shape, roots, ids)
    return _fixed_ranks(first, expand, shape, roots, ids)


def _beam_search(
    first: Tensor, expand: Expand, shape: DynamicTree, roots: Sequence[int], ids: Tensor
) -> list[Tree]:
    """Expand the k likeliest of each level, then keep the likeliest nodes of all levels
    (spec/eagle.md 6.3).
    """
    batch, k = len(roots), min(shape.topk, first.shape[1])
    own = torch.eye(k, dtype=torch.bool, device=first.device).expand(batch, k, k)
    scores, columns = first.float().log_softmax(-1).topk(k)
    tokens, origins = ids[columns], torch.zeros_like(columns)
    levels = [(tokens, scores, torch.full_like(columns, -1))]
    numbers = torch.arange(k, device=first.device).expand(batch, k)
    seen, start = own, k
    for level in range(shape.depth - 1):
        depths = torch.arange(level + 1).repeat_interleave(k)
        logits = expand(tokens, origins, seen, depths)
        logp, columns = logits.float().log_softmax(-1).topk(k)
        logp = (scores[:, :, None] + logp).flatten(1)
        children = ids[columns].flatten(1)
        levels.append((children, logp, numbers.repeat_interleave(k, 1)))
        scores, chosen = logp.topk(k)
        tokens, origins = children.gather(1, chosen), chosen // k
        kept = seen.gather(1, origins[:, :, None].expand(-1, -1, seen.shape[-1]))
        seen = torch.cat([kept, own], -1)
        numbers, start = start + chosen, start + k * k
    all_tokens, all_scores, parents = (torch.cat(column, 1) for column in zip(*levels, strict=True))
    return [
        choose_nodes(all_tokens[i], all_scores[i], parents[i], root, shape.nodes)
        for i, root in enumerate(roots)
    ]


def _fixed_ranks(
    first: Tensor, expand: Expand, shape: RankTree, roots: Sequence[int], ids: Tensor
) -> list[Tree]:
    """Fill the paths of ranks; only nodes with children are run."""
    device, skeleton = first.device, Tree([0] * (shape.nodes + 1), shape.parents)
    tokens = [torch.tensor(roots, device=device)]
    # For each node that was run, the target ids behind it, best first [B, ranks].
    best = {0: ids[first.topk(shape.ranks).indices]}
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
        logits = expand(
            torch.stack([tokens[n] for n in frontier], 1),
            origins.expand(len(roots), -1),
            seen.expand(len(roots), -1, -1),
            torch.tensor([skeleton.depths[n] - 1 for n in run]),
        )
        ranked = ids[logits.topk(shape.ranks).indices]
        best |= {node: ranked[:, i] for i, node in enumerate(frontier)}
        before = frontier
    rows = torch.stack(tokens, 1).tolist()
    return [Tree(row, shape.parents) for row in rows]
