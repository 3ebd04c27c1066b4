"""The ratio rule: drafts drawn from the drafter's own distribution, kept with probability
min(1, p / q), else a draw from what is left of p (spec/verifier.md 3.2 B and C, spec/medusa.md 4.4
and 4.5).

The text has the target's distribution, but it is another text than that of plain sampling: which
draws are kept depends on the drafts.

Shapes: n rows, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headsmith.inference.accept import Accepted, Sample
from headsmith.inference.noise import Place, coin, gumbel
from headsmith.inference.sampling import PLAIN, Shaping
from headsmith.inference.tree import Tree

# Probabilities [V]: float64, or exact fractions where the tests enumerate.
Distribution = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Rejection sampling of drawn drafts, chains and trees without replacement.

    A draft that was not drawn (greedy, n-gram, given text) counts as drawn with probability 1: it
    is kept with probability p, as `Sample` keeps it. Random numbers are keyed by seed, request and
    position: of all passes that draft a position only the one that commits it uses them.
    """

    temperature: float
    seed: int = 0
    shaping: Shaping = PLAIN
    lossless: ClassVar[bool] = True
    coupled: ClassVar[bool] = False

    @property
    def plain(self) -> Sample:
        """The same settings without a draft."""
        return Sample(self.temperature, self.seed, self.shaping)

    def scores(self, logits: Tensor, places: Sequence[Place], slack: float = 0.0) -> Tensor:
        return self.plain.scores(logits, places, slack)

    def accept(
        self, tree: Tree, logits: Tensor, choices: list[int], places: Sequence[Place]
    ) -> Accepted:
        if len(tree) == 1:
            return Accepted([0], choices[0])

        def target(node: int) -> Distribution:
            rows = self.plain.log_weights(logits[node : node + 1], [places[node]])
            return np.asarray(rows[0].double().softmax(-1).cpu())

        return walk(
            tree,
            target,
            lambda node, sibling, x: self.chance(places[node], sibling, x),
            lambda node, p: self.draw(places[node], p),
        )

    def chance(self, place: Place, sibling: int, probability: float) -> bool:
        """True with that probability; each draft for a place has a coin of its own."""
        return coin(self.seed, place, f"coin {sibling}/") < probability

    def draw(self, place: Place, p: Distribution) -> int:
        """A token of p [V], by the noise that plain sampling has there."""
        with np.errstate(divide="ignore"):
            weights = torch.from_numpy(np.log(p)).float()
        return int((weights + gumbel(self.seed, place, len(p))).argmax())


def walk(
    tree: Tree,
    target: Callable[[int], Distribution],
    chance: Callable[[int, int, Any], bool],
    draw: Callable[[int, Distribution], int],
) -> Accepted:
    """Test the children of each node in the order they were drawn; follow the first that is kept,
    or draw from what is left of the target's distribution.

    `target(node)` is p [V] behind a node, all settings counted; `chance(node, sibling, x)` is true
    with probability x, 0 <= x <= 1; `draw(node, p)` a token of p.
    """
    node, path = 0, [0]
    while True:
        p = target(node)
        if not tree.children[node]:
            return Accepted(path, draw(node, p))
        q = drafted_from(tree, node, p)
        kept = None
        for sibling, child in enumerate(tree.children[node]):
            token = tree.tokens[child]
            mine = one_hot(p, token) if q is None else q
            if chance(node, sibling, acceptance(p[token], mine[token])):
                kept = child
                break
            p = residual(p, mine)
            q = None if q is None else without(q, token)
        if kept is None:
            return Accepted(path, draw(node, p))
        node = kept
        path.append(node)


def drafted_from(tree: Tree, node: int, like: Distribution) -> Distribution | None:
    """q [V] behind a node: 0 for what the drafter has no id for. None: its children are no draws.

    Of the type of `like`.
    """
    drawn = tree.drawn
    if drawn is None or drawn.rows[node] < 0:
        return None
    q = np.zeros_like(like)
    q[np.asarray(drawn.ids)] = np.asarray(drawn.q[drawn.rows[node]])
    return normalised(q)


def acceptance(p: Any, q: Any) -> Any:
    """min(1, p / q); 0 for what the target never says, and for what could not be drawn."""
    if p <= 0 or q <= 0:
        return 0
    return 1 if p >= q else p / q


def residual(p: Distribution, q: Distribution) -> Distribution:
    """What p has more than q, normalised. Nothing is left only if p is q, and then nothing is
    rejected but by rounding: p itself stands for it.
    """
    left = np.maximum(p - q, 0)
    return normalised(left) if left.sum() > 0 else p


def without(q: Distribution, token: int) -> Distribution:
    """q given that `token` is out, for a draw without replacement; nothing left is all zeros."""
    left = q.copy()
    left[token] = 0
    return normalised(left) if left.sum() > 0 else left


def one_hot(like: Distribution, token: int) -> Distribution:
    """The distribution of a draft that was no draw."""
    q = np.zeros_like(like)
    q[token] = 1
    return q


def normalised(weights: Distribution) -> Distribution:
    """Weights [V] that sum to 1; their type is kept."""
    return weights / weights.sum()
