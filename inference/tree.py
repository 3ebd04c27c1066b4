"""Draft trees: proposed tokens with their parents. A chain is a tree; the root is the last
committed token.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.drafter_choice import Lookahead


@dataclass(frozen=True)
class Chain:
    """Draft shape: `depth` tokens one behind the other."""

    depth: int

    def __post_init__(self) -> None:
        _positive(self, depth=self.depth)

    @property
    def nodes(self) -> int:
        return self.depth

    def __str__(self) -> str:
        return f"chain:{self.depth}"


@dataclass(frozen=True)
class DynamicTree:
    """Draft shape (EAGLE-2, spec/eagle.md 6.3): the `nodes` likeliest of a beam of `topk` over
    `depth` levels.
    """

    nodes: int
    topk: int
    depth: int

    def __post_init__(self) -> None:
        _positive(self, nodes=self.nodes, topk=self.topk, depth=self.depth)

    def __str__(self) -> str:
        return f"tree:{self.nodes},{self.topk},{self.depth}"


@dataclass(frozen=True)
class RankTree:
    """Draft shape of one fixed tree (spec/medusa.md 3.1): path (a_1, .., a_m) is a node m deep,
    whose token is the a_m-th best (from 0 the best) behind the node of the path without a_m. Medusa
    heads rank the tokens of depth m alike for all nodes, other models for each node.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = {(), *self.paths}
        if not self.paths or len(known) != len(self.paths) + 1:
            raise HeadsmithError(
                "a draft tree of no paths, or with a path twice; calibrate the head again"
            )
        for path in self.paths:
            if path[:-1] not in known:
                raise HeadsmithError(
                    f"the draft tree has {list(path)} without the path to it; calibrate the head "
                    "again"
                )
        # Parents before children.
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda p: (len(p), p))))

    @classmethod
    def chain(cls, depth: int) -> "RankTree":
        """The best of each head, one behind the other."""
        return cls(tuple((0,) * m for m in range(1, depth + 1)))

    @property
    def nodes(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def ranks(self) -> int:
        """How many candidates of a head it can ask for."""
        return 1 + max(max(path) for path in self.paths)

    @cached_property
    def parents(self) -> list[int]:
        """Parent of every node, the root (node 0, parent -1) first."""
        number = {path: node for node, path in enumerate(self.paths, start=1)} | {(): 0}
        return [-1, *(number[path[:-1]] for path in self.paths)]

    def __str__(self) -> str:
        return f"medusa:{self.nodes}"


@dataclass(frozen=True)
class Calibrated:
    """Draft shape by name: the tree stored with a Medusa head, or one of `nodes` nodes made from
    the accuracies stored with it.
    """

    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None:
            _positive(self, nodes=self.nodes)

    def __str__(self) -> str:
        return "stored" if self.nodes is None else f"medusa:{self.nodes}"


@dataclass(frozen=True)
class Branches:
    """Draft shape of drawn trees: every node at depth m has `widths[m]` children, drawn without
    replacement. A chain is one of widths 1.
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        for number, width in enumerate(self.widths, start=1):
            _positive(self, **{f"width {number}": width})

    @cached_property
    def levels(self) -> list[int]:
        """How many nodes each depth has, from depth 1."""
        return [math.prod(self.widths[: m + 1]) for m in range(self.depth)]

    @property
    def nodes(self) -> int:
        return sum(self.levels)

    @property
    def topk(self) -> int:
        """Nodes of the fullest depth."""
        return self.levels[-1]

    @property
    def depth(self) -> int:
        return len(self.widths)

    def __str__(self) -> str:
        return f"branches:{','.join(map(str, self.widths))}"


Shape = Chain | DynamicTree | RankTree | Lookahead | Branches
Draft = Chain | DynamicTree | RankTree | Branches | Calibrated


def _positive(shape: object, **sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise HeadsmithError(f"draft {shape}: {name} is {value}; it must be at least 1")


def parse_shape(text: str) -> Draft:
    """`chain:DEPTH`, `tree:NODES,TOPK,DEPTH`, `static:FILE`, `branches:WIDTH,...`, `medusa:NODES`
    or `stored`. Raises HeadsmithError.
    """
    if text == "stored":
        return Calibrated()
    kind, _, sizes = text.partition(":")
    if kind == "static" and sizes:
        from headsmith.inference.rank_tree import read_static

        return read_static(sizes)
    try:
        numbers = [int(size) for size in sizes.split(",")]
        if kind == "chain" and len(numbers) == 1:
            return Chain(numbers[0])
        if kind == "tree" and len(numbers) == 3:
            return DynamicTree(*numbers)
        if kind == "branches":
            return Branches(tuple(numbers))
        if kind == "medusa" and len(numbers) == 1:
            return Calibrated(numbers[0])
    except ValueError:
        pass
    raise HeadsmithError(
        f"draft {text!r} is neither chain:DEPTH nor tree:NODES,TOPK,DEPTH nor static:FILE, nor for "
        "a Medusa head medusa:NODES or stored, nor for rule ratio branches:WIDTH,WIDTH,...; give "
        "for example chain:4"
    )


@dataclass(frozen=True)
class Drawn:
    """What the children of a tree's nodes were drawn from, without replacement, the eldest first.

    `ids` int64 [D] are the drafter's target ids, `q` float64 [R, D] its distributions, `rows[i]`
    the one behind node i, or -1 where nothing was drawn.
    """

    ids: Tensor
    q: Tensor
    rows: list[int]


@dataclass(frozen=True)
class Tree:
    """Tokens of a tree in an order where parents precede children; node 0 is the root, its parent
    is -1. `drawn` None: no draft is a draw.
    """

    tokens: list[int]
    parents: list[int]
    drawn: Drawn | None = None

    @classmethod
    def chain(cls, tokens: list[int]) -> "Tree":
        """The root and its drafts, one behind the other."""
        return cls(tokens, list(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> list[int]:
        """Distance of every node from the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """Tokens of every node and its ancestors, the root left out, eldest first."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append(() if parent < 0 else (*paths[parent], token))
        return paths

    @property
    def depth(self) -> int:
        """Drafts on the longest path."""
        return max(self.depths)

    @cached_property
    def children(self) -> list[list[int]]:
        """Children of every node, ascending."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        return children

    @cached_property
    def ancestors(self) -> Tensor:
        """bool [N, N]: row i marks the nodes on the path from the root to i, both included."""
        seen = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return torch.from_numpy(seen)

    def cut(self, depth: int) -> "Tree":
        """The tree without the nodes deeper than `depth`."""
        if self.depth <= depth:
            return self
        kept = [node for node, d in enumerate(self.depths) if d <= depth]
        renumbered = {node: i for i, node in enumerate(kept)} | {-1: -1}
        drawn = self.drawn
        if drawn is not None:
            drawn = replace(drawn, rows=[drawn.rows[i] for i in kept])
        parents = [renumbered[self.parents[i]] for i in kept]
        return Tree([self.tokens[i] for i in kept], parents, drawn)


def choose_nodes(tokens: Tensor, scores: Tensor, parents: Tensor, root: int, count: int) -> Tree:
    """The `count` likeliest candidates as a tree below `root`.

    tokens int64 [C], cumulative log-probabilities scores [C], parents int64 [C] (candidate number,
    -1 the root), numbered so that parents come first. Equal scores go to the lower number, so no
    child is taken without its parent.
    """
    # A sort puts NaN first; a child would then be taken before a parent that is a number.
    ranked = scores.masked_fill(scores.isnan(), float("-inf"))
    order = torch.sort(ranked, descending=True, stable=True).indices[:count]
    chosen = order.sort().values
    renumbered = torch.searchsorted(chosen, parents[chosen]) + 1
    tree_parents = torch.where(parents[chosen] < 0, 0, renumbered)
    return Tree([root, *tokens[chosen].tolist()], [-1, *tree_parents.tolist()])
