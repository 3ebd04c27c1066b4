"""Acceptance rules: which path of a verified tree is kept, and which token the target adds
(spec/verifier.md 3, spec/medusa.md 4).

A rule chooses the target's token behind each row of logits, and keeps a path of a tree. `Greedy`
and `Sample` keep what they would have chosen without a draft, so the text is the same with and
without one. `Ratio` (headsmith.inference.ratio) keeps the distribution only. `Typical` keeps
neither, and says so.

Shapes: n rows, V target vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from headsmith.inference.noise import Place, gumbel
from headsmith.inference.processors import adjust, cut
from headsmith.inference.sampling import PLAIN, Shaping
from headsmith.inference.tree import Tree

# The authors' default; see `Typical`.
POSTERIOR_THRESHOLD = 0.09


@dataclass(frozen=True, slots=True)
class Accepted:
    """`path` are the accepted nodes, the root first; `bonus` is the target's token behind the last
    of them.
    """

    path: list[int]
    bonus: int


class Rule(Protocol):
    """What decides between drafts and the target. `lossless`: the text has the distribution that
    plain decoding by the same rule gives. `coupled`: it is that text, token for token.
    """

    lossless: ClassVar[bool]
    coupled: ClassVar[bool]

    def scores(self, logits: Tensor, places: Sequence[Place], slack: float = 0.0) -> Tensor:
        """Float32 [n, V] whose argmax is the target's choice behind each row of logits [n, V];
        -inf where a setting leaves a token out. `slack` as in `processors.cut`.
        """
        ...

    def accept(
        self, tree: Tree, logits: Tensor, choices: list[int], places: Sequence[Place]
    ) -> Accepted:
        """The path to keep of a tree of n nodes, from the logits [n, V], the choices behind them
        and the places of those.
        """
        ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """The argmax of the target's logits, bias and penalties counted, always."""

    shaping: Shaping = PLAIN
    lossless: ClassVar[bool] = True
    coupled: ClassVar[bool] = True

    def scores(self, logits: Tensor, places: Sequence[Place], slack: float = 0.0) -> Tensor:
        return adjust(self.shaping, logits, places) if self.shaping.adjusts else logits

    def accept(
        self, tree: Tree, logits: Tensor, choices: list[int], places: Sequence[Place]
    ) -> Accepted:
        return follow(tree, choices)


@dataclass(frozen=True, slots=True)
class Sample:
    """A draw from the target's distribution under `temperature` and the other settings: the argmax
    of logits / temperature + Gumbel noise, which is keyed by seed, request and position
    (spec/medusa.md 4.5, T1).

    Noise depends on nothing else, so nodes of one depth share it, a draft that is dropped is drawn
    again alike, and text and distribution are those of plain sampling with any drafter that
    proposes before it sees the noise.
    """

    temperature: float
    seed: int = 0
    shaping: Shaping = PLAIN
    lossless: ClassVar[bool] = True
    coupled: ClassVar[bool] = True

    def scores(self, logits: Tensor, places: Sequence[Place], slack: float = 0.0) -> Tensor:
        noise = {place: gumbel(self.seed, place, logits.shape[1]) for place in set(places)}
        drawn = torch.stack([noise[place] for place in places]).to(logits.device)
        return self.log_weights(logits, places, slack) + drawn

    def log_weights(self, logits: Tensor, places: Sequence[Place], slack: float = 0.0) -> Tensor:
        """What is drawn from, float32 [n, V]: its softmax is the final distribution behind each
        row, all settings counted.
        """
        scores = adjust(self.shaping, logits, places) / self.temperature
        return cut(self.shaping, scores, slack)

    def accept(
        self, tree: Tree, logits: Tensor, choices: list[int], places: Sequence[Place]
    ) -> Accepted:
        return follow(tree, choices)


@dataclass(frozen=True, slots=True)
class Typical:
    """Medusa's typical acceptance (spec/medusa.md 4.2), lossy: a draft is kept where the target
    finds it likely enough, p > min(threshold, alpha exp(-entropy)), p at `temperature`; the longest
    such path, the likelier of two as long. Behind it comes the target's argmax.

    There is no random number in it: temperature moves the bar and nothing else. `alpha` None is
    sqrt(threshold).
    """

    temperature: float
    threshold: float = POSTERIOR_THRESHOLD
    alpha: float | None = None
    lossless: ClassVar[bool] = False
    coupled: ClassVar[bool] = False

    @property
    def relaxation(self) -> float:
        """The alpha in use."""
        return math.sqrt(self.threshold) if self.alpha is None else self.alpha

    def scores(self, logits: Tensor, places: Sequence[Place], slack: float = 0.0) -> Tensor:
        return logits

    def accept(
        self, tree: Tree, logits: Tensor, choices: list[int], places: Sequence[Place] = ()
    ) -> Accepted:
        if len(tree) == 1:
            return Accepted([0], choices[0])
        log_p = (logits.float() / self.temperature).log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * (p + 1e-5).log()).sum(-1)
        bars = (self.relaxation * (-entropy).exp()).clamp(max=self.threshold).tolist()
        tokens = torch.tensor(tree.tokens[1:], device=logits.device)
        parents = torch.tensor(tree.parents[1:], device=logits.device)
        drafted = log_p[parents, tokens].tolist()
        # Best path to each node that can be reached: parents stand before their children.
        reached: dict[int, tuple[int, float]] = {0: (0, 0.0)}
        for node, parent in enumerate(tree.parents[1:], start=1):
            likely = drafted[node - 1]
            if parent in reached and math.exp(likely) > bars[parent]:
                depth, total = reached[parent]
                reached[node] = (depth + 1, total + likely)
        last = max(reached, key=reached.__getitem__)
        path = [last]
        while path[-1] != 0:
            path.append(tree.parents[path[-1]])
        return Accepted(path[::-1], choices[last])


GREEDY = Greedy()


def follow(tree: Tree, choices: list[int]) -> Accepted:
    """Follow the target's choices from the root for as long as a child holds them
    (spec/verifier.md 3.1).

    `choices[i]` is the target's token behind node i. Nothing else is ever kept, so the text is what
    the target would have written.
    """
    node, path = 0, [0]
    while True:
        following = next((c for c in tree.children[node] if tree.tokens[c] == choices[node]), None)
        if following is None:
            return Accepted(path, choices[node])
        node = following
        path.append(node)
