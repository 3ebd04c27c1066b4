"""Drafters that propose on the device, from a round's state alone.

Shapes: B requests, N nodes of a tree, P tokens of the longest path, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from headsmith.inference.beam import grow_trees
from headsmith.inference.cache import KeyValueCache
from headsmith.inference.drafters import Drafter, EagleDrafter, Update
from headsmith.inference.kernels.plan import Plan, words_of
from headsmith.inference.kernels.tree_attention import tree_attention
from headsmith.inference.kernels.tree_build import MOST_NODES, Trees
from headsmith.inference.medusa import MedusaDrafter, best_tokens
from headsmith.inference.resident.state import State
from headsmith.inference.stages import stage
from headsmith.inference.tree import Chain, DynamicTree, Tree


class Drafting(Protocol):
    """What drafts trees of `nodes` nodes, `depth` deep. All of them are `chain`s or none is."""

    nodes: int
    depth: int
    chain: bool

    @property
    def cache(self) -> KeyValueCache | None:
        """Keys and values of its own."""
        ...

    def settle(self, update: Update) -> Update:
        """Take in, from the host, all that was committed but the last token; what is left."""
        ...

    def follow(self, slot: int, rows: int) -> None:
        """Learn how many rows of a slot rounds on the device have filled."""
        ...

    def draft(self, state: State) -> Trees:
        """The trees of all requests; nothing may ask the host."""
        ...


def drafting_of(drafter: Drafter | None) -> Drafting | None:
    """How a drafter works on the device; None if it does not."""
    # Of these classes themselves: what inherits from one does something else.
    if drafter is None:
        return Nothing()
    if type(drafter) is EagleDrafter and isinstance(drafter.shape, Chain | DynamicTree):
        return EagleOnDevice(drafter) if drafter.shape.nodes < MOST_NODES else None
    if type(drafter) is MedusaDrafter:
        return MedusaOnDevice(drafter) if drafter.tree.nodes < MOST_NODES else None
    return None


class Skeleton:
    """Trees whose form is known beforehand: only their tokens are drafted, and nothing of a request
    is remembered.
    """

    cache: KeyValueCache | None = None

    def __init__(self, parents: list[int]) -> None:
        tree = Tree([0] * len(parents), parents)
        self.nodes, self.depth, self.chain = len(parents), tree.depth, tree.is_chain
        self._tree = tree
        self._tables: list[Tensor] = []

    def settle(self, update: Update) -> Update:
        return only_last(update)

    def follow(self, slot: int, rows: int) -> None:
        """Nothing to know."""

    def trees(self, state: State, drafted: Tensor | None) -> Trees:
        """The trees of `drafted` int64 [B, N - 1], in the order of the nodes, behind the roots."""
        if not self._tables:
            device, tree = state.slots.device, self._tree
            self._tables = [
                torch.tensor(tree.parents, dtype=torch.int32, device=device),
                torch.tensor(tree.depths, device=device),
                words_of(tree.ancestors).flatten().to(device),
            ]
        parents, depths, words = self._tables
        batch, roots = len(state.slots), state.roots[:, None]
        tokens = roots if drafted is None else torch.cat([roots, drafted], 1)
        return Trees(
            tokens,
            parents.expand(batch, -1),
            state.starts[:, None] + depths,
            words.expand(batch, -1),
        )


class Nothing(Skeleton):
    """Plain decoding: the root alone."""

    def __init__(self) -> None:
        super().__init__([-1])

    def draft(self, state: State) -> Trees:
        return self.trees(state, None)


class MedusaOnDevice(Skeleton):
    """Every head's ranks in a fixed tree, read from the state of the last accepted token."""

    def __init__(self, drafter: MedusaDrafter) -> None:
        super().__init__(drafter.tree.parents)
        self._drafter = drafter
        paths = drafter.tree.paths
        self._heads, self._ranks = [len(p) - 1 for p in paths], [p[-1] for p in paths]
        self._places: Tensor | None = None

    def draft(self, state: State) -> Trees:
        tree, device = self._drafter.tree, state.slots.device
        if self._places is None:
            self._places = torch.tensor([self._heads, self._ranks], device=device)
        with stage("draft heads"):
            last = state.last[state.newest]
            head, target = self._drafter.head, self._drafter.target
            ranked = best_tokens(head, target, last, tree.depth, tree.ranks)
        heads, ranks = self._places
        return self.trees(state, ranked[:, heads, ranks])


class EagleOnDevice:
    """An EAGLE head's chains and beams; its cache has the slots of the target's."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self._drafter, shape = drafter, drafter.shape
        self.chain = isinstance(shape, Chain)
        nodes = shape.nodes
        if isinstance(shape, DynamicTree):
            k = min(shape.topk, drafter.ranking.size)
            nodes = min(nodes, k + (shape.depth - 1) * k * k)
        self.nodes, self.depth = nodes + 1, min(shape.depth, nodes)
        self._chains = Skeleton(Tree.chain([0] * self.nodes).parents) if self.chain else None

    @property
    def cache(self) -> KeyValueCache:
        return self._drafter.cache

    def settle(self, update: Update) -> Update:
        if len(update.tokens) > 1:
            rows = None if update.rows is None else update.rows[:-1]
            states = update.states[:-1] if rows is None else update.states
            self._drafter.absorb(
                replace(update, tokens=update.tokens[:-1], states=states, rows=rows)
            )
        return only_last(update)

    def follow(self, slot: int, rows: int) -> None:
        self._drafter.follow(slot, rows)

    def draft(self, state: State) -> Trees:
        with stage("draft input"):
            g = self._extend(state)
        if self._chains is not None:
            return self._chains.trees(state, self._steps(state, g))
        return self._beam(state, g)

    def _extend(self, state: State) -> Tensor:
        """Cache the committed rows; g [B, H] of the last of each. Behind it stand rows of padding,
        which the drafted ones overwrite before anybody sees them.
        """
        batch, path = state.tokens.shape
        order = torch.arange(path, device=state.slots.device)
        starts = state.starts - state.counts
        positions = (starts[:, None] + order).flatten()
        slots = state.slots[:, None].expand(batch, path).flatten()
        z = self._drafter.reading.fuse_at(state.taps, state.rows.flatten())
        last = torch.arange(batch, device=order.device) * path + state.counts - 1
        attend = self._attending(slots, positions, self._single(state, state.starts - 1))
        return self._drafter.run_layer(state.tokens.flatten(), z, positions, attend, last)

    def _steps(self, state: State, g: Tensor) -> Tensor:
        """Chains of the likeliest tokens, int64 [B, depth]."""
        drafter, drafted = self._drafter, []
        for step in range(self.depth):
            with stage("draft lm_head"):
                tokens = drafter.ranking.likeliest(g)
            drafted.append(tokens)
            if step + 1 < self.depth:
                rows = state.starts + step
                with stage("draft layer"):
                    attend = self._attending(state.slots, rows, self._single(state, rows))
                    g = drafter.run_layer(tokens, drafter.head.feedback(g), rows, attend)
        return torch.stack(drafted, 1)

    def _beam(self, state: State, g: Tensor) -> Trees:
        drafter, shape = self._drafter, self._drafter.shape
        assert isinstance(shape, DynamicTree)
        states = drafter.head.feedback(g)[:, None]

        def expand(tokens: Tensor, origins: Tensor, seen: Tensor, depths: Tensor) -> Tensor:
            nonlocal states
            batch, m = tokens.shape
            states = states.gather(1, origins[:, :, None].expand(-1, -1, states.shape[-1]))
            behind = depths.expand(batch, -1)
            plan = Plan.even(state.slots, state.starts, behind, words_of(seen), self.cache.capacity)
            positions = (state.starts[:, None] + behind[:, -m:]).flatten()
            with stage("draft layer"):
                attend = self._attending(plan.slots, plan.rows, plan)
                g = drafter.run_layer(tokens.flatten(), states.flatten(0, 1), positions, attend)
                states = drafter.head.feedback(g).view(batch, m, -1)
            return g.view(batch, m, -1)

        return grow_trees(g, expand, shape, state.roots, state.starts, drafter.ranking)

    def _single(self, state: State, rows: Tensor) -> Plan:
        """One token a request, at its row int64 [B], which sees all before it."""
        depths = torch.zeros_like(rows)[:, None]
        return Plan.even(state.slots, rows, depths, None, self.cache.capacity)

    def _attending(
        self, slots: Tensor, rows: Tensor, plan: Plan
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Stores keys and values at their rows; the queries are those of the plan."""
        cache, window = self.cache, self._drafter.head.config.sliding_window

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.store(0, slots, rows, keys, values)
            return tree_attention(query, *cache.stores(0), plan, window=window)

        return attend


def only_last(update: Update) -> Update:
    """The last token of an update and its states, which are all that is left to take in."""
    row = -1 if update.rows is None else update.rows[-1]
    states = update.states[row][None]
    return replace(update, tokens=update.tokens[-1:], states=states, rows=None)
