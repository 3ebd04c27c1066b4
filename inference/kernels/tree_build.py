"""Draft trees of a batch on the device: one launch a level of the beam, one for the finished trees,
and the plain references (spec/eagle.md 6.3). The rules are those of `headsmith.inference.beam` and
`choose_nodes`, ties included: of equal scores the lower number wins.

Shapes: B requests, m nodes of a frontier, k children of each, C candidates of all levels, N drafts
of a tree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headsmith.inference.kernels import runs, use_kernels

# Nodes of a tree, the root included, have a bit each in one word.
MOST_NODES = 64


class Candidates(NamedTuple):
    """Everything drafted so far: target ids int64 [B, C], cumulative log-probabilities float32
    [B, C], parents int64 [B, C] (candidate number, -1 the root).
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor

    @classmethod
    def empty(cls, batch: int, topk: int, depth: int, device: torch.device) -> Candidates:
        """Room for the levels of a beam: topk of the first, topk times topk of each other."""
        shape = (batch, topk + (depth - 1) * topk * topk)
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        scores = torch.zeros(shape, dtype=torch.float32, device=device)
        return cls(tokens, scores, torch.full_like(tokens, -1))


class Frontier(NamedTuple):
    """The nodes that are run next, [B, k]: target ids, cumulative scores float32, candidate
    numbers, and `origins`, which node of the frontier before drafted each; all int64 but for the
    scores.
    """

    tokens: Tensor
    scores: Tensor
    numbers: Tensor
    origins: Tensor


class Trees(NamedTuple):
    """Trees of N drafts behind their roots (node 0), all [B, N + 1]: tokens int64, parents int32
    (-1 of the root), positions int64, and int64 words with the bits of each node's ancestors and
    its own.
    """

    tokens: Tensor
    parents: Tensor
    positions: Tensor
    words: Tensor


def grow(
    ids: Tensor, logp: Tensor, before: Frontier | None, found: Candidates, level: int
) -> Frontier:
    """Take the k likeliest children of each node of the frontier `before` (None: of the root) into
    `found` and choose the next frontier.

    ids int64 [B, m, k] and logp float32 [B, m, k] are the children, the likeliest first; `level` is
    0 for children of the root.
    """
    if use_kernels(ids.device):
        from headsmith.inference.kernels.tree_build_triton import launch_grow

        runs("tree build")
        return launch_grow(ids, logp, before, found, level)
    return reference_grow(ids, logp, before, found, level)


def reference_grow(
    ids: Tensor, logp: Tensor, before: Frontier | None, found: Candidates, level: int
) -> Frontier:
    """`grow` in plain PyTorch."""
    batch, nodes, k = ids.shape
    first = first_of(level, k)
    scores = logp if before is None else before.scores[:, :, None] + logp
    tokens, scores = ids.flatten(1), scores.flatten(1)
    if before is None:
        parents = torch.full_like(tokens, -1)
    else:
        parents = before.numbers.repeat_interleave(k, 1)
    here = slice(first, first + nodes * k)
    for column, values in zip(found, (tokens, scores, parents), strict=True):
        column[:, here] = values
    order = torch.sort(_ranked(scores), descending=True, stable=True, dim=-1).indices[:, :k]
    return Frontier(tokens.gather(1, order), scores.gather(1, order), first + order, order // k)


def build(found: Candidates, roots: Tensor, lengths: Tensor, nodes: int) -> Trees:
    """The trees of the `nodes` likeliest candidates (or all) of each request.

    roots int64 [B] are the last committed tokens and lengths int64 [B] their positions, the number
    of tokens before them.
    """
    nodes = min(nodes, found.scores.shape[1])
    assert nodes < MOST_NODES, f"{nodes} drafts and the root need {nodes + 1} bits"
    if use_kernels(roots.device):
        from headsmith.inference.kernels.tree_build_triton import launch_build

        runs("tree build")
        return launch_build(found, roots, lengths, nodes)
    return reference_build(found, roots, lengths, nodes)


def reference_build(found: Candidates, roots: Tensor, lengths: Tensor, nodes: int) -> Trees:
    """`build` in plain PyTorch."""
    order = torch.sort(_ranked(found.scores), descending=True, stable=True, dim=-1).indices
    chosen = order[:, :nodes].sort(-1).values
    above = found.parents.gather(1, chosen)
    numbered = torch.searchsorted(chosen, above) + 1
    parents = torch.where(above < 0, 0, numbered)
    tokens = torch.cat([roots[:, None], found.tokens.gather(1, chosen)], 1)
    bits = torch.ones_like(tokens) << torch.arange(nodes + 1, device=tokens.device)
    depths = torch.zeros_like(tokens)
    for node in range(1, nodes + 1):
        parent = parents[:, node - 1 : node]
        bits[:, node : node + 1] |= bits.gather(1, parent)
        depths[:, node : node + 1] = depths.gather(1, parent) + 1
    whole = torch.cat([torch.full_like(roots[:, None], -1), parents], 1).int()
    return Trees(tokens, whole, lengths[:, None] + depths, bits)


def first_of(level: int, k: int) -> int:
    """Number of the first candidate of a level."""
    return 0 if level == 0 else k + (level - 1) * k * k


def _ranked(scores: Tensor) -> Tensor:
    """Scores to sort by: a sort puts NaN first, and a child would come before its parent."""
    return scores.masked_fill(scores.isnan(), float("-inf"))
