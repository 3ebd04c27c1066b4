"""Drafters that draw from the head's own distribution and hand it over, for rule `ratio`
(spec/verifier.md 3.2 B and C, spec/medusa.md 4.5, T3).

The head's distribution is that of its logits under the rule's temperature, top-k, top-p and min-p.
Penalties and bias are the target's alone: any distribution will do, as long as it is the one that
was drawn from. Which nodes a tree has never depends on what was drawn.

Shapes: B requests, F nodes of a level, w children each, R nodes with children, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.drafters import Drafter, EagleDrafter, Update
from headsmith.inference.medusa import MedusaDrafter, head_logits
from headsmith.inference.noise import gumbel
from headsmith.inference.processors import cut
from headsmith.inference.ratio import Ratio
from headsmith.inference.tree import Branches, Chain, Draft, Drawn, DynamicTree, RankTree, Tree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.heads import Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.spans import Span
from headsmith.models.target import Target


def draw_with(head: Head, target: Target, shape: Draft, rule: Ratio) -> Drafter:
    """The drafter of `head` that draws; HeadsmithError for a shape that holds no draws."""
    likeliest = (DynamicTree,) if isinstance(head, MedusaHead) else (DynamicTree, RankTree)
    if isinstance(shape, likeliest):
        raise HeadsmithError(
            f"draft {shape} keeps the likeliest nodes, and rule ratio needs nodes that were drawn; "
            "give chain:DEPTH or branches:WIDTH,WIDTH,..., or take --rule sample"
        )
    if isinstance(head, MedusaHead):
        return DrawnMedusaDrafter(head, target, shape, rule)
    return DrawnEagleDrafter(head, target, shape, rule)


class DrawnEagleDrafter(EagleDrafter):
    """Draws chains and trees with an EAGLE-3 head, each node's children without replacement."""

    def __init__(self, head: Eagle3Head, target: Target, shape: Draft, rule: Ratio) -> None:
        branches = shape if isinstance(shape, Branches) else None
        super().__init__(head, target, Chain(branches.depth) if branches else shape)
        self.rule = rule
        self.shape = branches or self.shape
        widths = branches.widths if branches else (1,) * self.shape.depth
        # A head that can draft few ids has no more children to draw.
        self._widths = [min(width, self.head.config.draft_vocab_size) for width in widths]

    @torch.inference_mode()
    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        g = self._extend(updates)[:, None]  # [B, 1, H]
        seen = torch.zeros(1, 0, dtype=torch.bool, device=g.device)
        depths: list[int] = []
        tokens, parents, drafted = [], [-1], []
        first = 0
        for level, width in enumerate(self._widths):
            batch, count = g.shape[:2]
            log_q = log_distribution(self.rule, self.head.logits(g.flatten(0, 1)))
            log_q = log_q.view(batch, count, -1)
            drafted.append(log_q)
            noise = _noise(self.rule, updates, level, log_q)
            picked = (log_q + noise[:, None]).topk(width).indices.flatten(1)  # [B, F * w]
            tokens.append(picked)
            parents += [first + i for i in range(count) for _ in range(width)]
            first += count
            if level + 1 == len(self._widths):
                break
            own = torch.eye(count * width, dtype=torch.bool, device=g.device)
            seen = torch.cat([seen.repeat_interleave(width, 0), own], -1)
            depths += [level] * (count * width)
            spans = [
                Span(count * width, self._lengths[u.slot], u.slot, seen, torch.tensor(depths))
                for u in updates
            ]
            states = self.head.feedback(g.flatten(0, 1)).view(batch, count, -1)
            states = states.repeat_interleave(width, 1).flatten(0, 1)
            fresh = self.head.draft_ids[picked.flatten()]
            g = self._layer(fresh, states, spans).view(batch, count * width, -1)
        columns = torch.cat(tokens, 1)
        q = torch.cat(drafted, 1).double().exp().cpu()
        ids = self.head.draft_ids.cpu()
        rows = [node if node < q.shape[1] else -1 for node in range(len(parents))]
        return [
            drawn_tree(u.tokens[-1], own, parents, Drawn(ids, mine, rows))
            for u, own, mine in zip(updates, columns.tolist(), q, strict=True)
        ]


class DrawnMedusaDrafter(MedusaDrafter):
    """Draws with Medusa heads: a node's n-th child holds the n-th draw of the head of its depth.

    Nodes of one depth share their draws, of which only those behind one of them are ever tested.
    """

    def __init__(self, head: MedusaHead, target: Target, shape: Draft, rule: Ratio) -> None:
        if isinstance(shape, Branches):
            widths = [range(width) for width in shape.widths]
            paths = (path for m in range(shape.depth) for path in product(*widths[: m + 1]))
            shape = RankTree(tuple(paths))
        super().__init__(head, target, shape)
        self.rule = rule
        form = Tree([0] * (self.tree.nodes + 1), self.tree.parents)
        self._order = {c: n for found in form.children for n, c in enumerate(found)}
        self._rows = [
            depth if found else -1 for depth, found in zip(form.depths, form.children, strict=True)
        ]
        self._depths = form.depths

    @torch.inference_mode()
    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        states = [update.last for update in updates if update.last is not None]
        assert len(states) == len(updates), "Medusa heads read the last state of every request"
        tree = self.tree
        logits = head_logits(self.head, self.target, torch.stack(states), tree.depth)
        log_q = log_distribution(self.rule, logits.flatten(0, 1)).view_as(logits)
        noise = torch.stack(
            [_noise(self.rule, updates, level, log_q) for level in range(tree.depth)], 1
        )
        draws = (log_q + noise).topk(1 + max(self._order.values())).indices.tolist()
        q = log_q.double().exp().cpu()
        ids = self.head.draft_ids.cpu()
        return [
            drawn_tree(
                update.tokens[-1],
                [mine[self._depths[n] - 1][self._order[n]] for n in range(1, tree.nodes + 1)],
                tree.parents,
                Drawn(ids, given, self._rows),
            )
            for update, mine, given in zip(updates, draws, q, strict=True)
        ]


def log_distribution(rule: Ratio, logits: Tensor) -> Tensor:
    """What is drawn from, float32 log-probabilities of logits [n, D]."""
    return cut(rule.shaping, logits.float() / rule.temperature).log_softmax(-1)


def _noise(rule: Ratio, updates: Sequence[Update], level: int, like: Tensor) -> Tensor:
    """Gumbel noise [B, D] for the drafts `level` places behind the first. Its largest sums with log
    q are draws without replacement, in that order.
    """
    noise = []
    for update in updates:
        assert update.place is not None, "draws are keyed by their place"
        place = replace(update.place, position=update.place.position + level)
        noise.append(gumbel(rule.seed, place, like.shape[-1], "draft "))
    return torch.stack(noise).to(like.device)


def drawn_tree(root: int, columns: list[int], parents: list[int], drawn: Drawn) -> Tree:
    """The tree of draws `columns` (into `drawn.ids`) behind `root`, without those that had no
    probability left (a distribution that was cut has fewer tokens than asked for).
    """
    behind = [drawn.rows[parent] for parent in parents[1:]]
    possible = (drawn.q[behind, columns] > 0).tolist()
    ids = drawn.ids[columns].tolist()
    new, tokens, kept_parents, rows = {0: 0}, [root], [-1], [drawn.rows[0]]
    for node, parent in enumerate(parents[1:], start=1):
        if parent in new and possible[node - 1]:
            new[node] = len(tokens)
            tokens.append(ids[node - 1])
            kept_parents.append(new[parent])
            rows.append(drawn.rows[node])
    return Tree(tokens, kept_parents, replace(drawn, rows=rows))
