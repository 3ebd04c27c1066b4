"""Which ids a model finds likeliest behind its states: by its logits, or by the kernel of the
output matrix, which writes none.

Shapes: states [..., H] of any leading shape, V ids, k likeliest of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from headsmith.inference.kernels import takes
from headsmith.inference.kernels.lm_head import Best, best_tokens
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target


class Ranking(Protocol):
    """Ranks `size` ids behind states; what it gives back are the target's ids."""

    @property
    def size(self) -> int: ...

    def likeliest(self, states: Tensor) -> Tensor:
        """The likeliest id, int64 [...]; of equal ones the lowest."""
        ...

    def best(self, states: Tensor, k: int) -> Tensor:
        """The k likeliest ids, best first, int64 [..., k]."""
        ...

    def scored(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Their log-probabilities float32 [..., k], and they themselves."""
        ...


@dataclass(frozen=True, slots=True)
class ByLogits:
    """By all `logits` [n, V] of states [n, H]; `ids` int64 [V] are the target's ids of their
    columns, None those themselves.
    """

    logits: Callable[[Tensor], Tensor]
    size: int
    ids: Tensor | None = None

    def likeliest(self, states: Tensor) -> Tensor:
        return self._ids(self._logits(states).argmax(-1))

    def best(self, states: Tensor, k: int) -> Tensor:
        return self._ids(self._logits(states).topk(k).indices)

    def scored(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores, columns = self._logits(states).float().log_softmax(-1).topk(k)
        return scores, self._ids(columns)

    def _logits(self, states: Tensor) -> Tensor:
        return self.logits(states.flatten(0, -2)).unflatten(0, states.shape[:-1])

    def _ids(self, columns: Tensor) -> Tensor:
        return columns if self.ids is None else self.ids[columns]


@dataclass(frozen=True, slots=True)
class ByKernel:
    """By the output matrix `weight` [V, H] itself, which reads what `norm` makes of the states."""

    weight: Tensor
    ids: Tensor | None = None
    norm: Callable[[Tensor], Tensor] | None = None

    @property
    def size(self) -> int:
        return len(self.weight)

    def likeliest(self, states: Tensor) -> Tensor:
        return self.best(states, 1)[..., 0]

    def best(self, states: Tensor, k: int) -> Tensor:
        return self._find(states, k).ids.unflatten(0, states.shape[:-1])

    def scored(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        found = self._find(states, k)
        scores = found.logits - found.lse[:, None]
        leading = states.shape[:-1]
        return scores.unflatten(0, leading), found.ids.unflatten(0, leading)

    def _find(self, states: Tensor, k: int) -> Best:
        rows = states.flatten(0, -2)
        return best_tokens(rows if self.norm is None else self.norm(rows), self.weight, k, self.ids)


def ranking_of_head(head: Eagle3Head) -> Ranking:
    """Of an EAGLE head's states g: its draft vocabulary."""
    if unpacked(head.lm_head) and takes(head.lm_head.weight):
        return ByKernel(head.lm_head.weight, head.draft_ids, head.norm)
    return ByLogits(head.logits, len(head.draft_ids), head.draft_ids)


def ranking_of_target(target: Target, size: int | None = None) -> Ranking:
    """Of a model's last states: its first `size` ids, or all."""
    count = target.vocab_size if size is None else size
    if takes(target.head_weight) and is_bare(target):
        return ByKernel(target.head_weight[:count])
    return ByLogits(lambda last: target.logits(last)[:, :count], count)


def is_bare(target: Target) -> bool:
    """Whether nothing is done to the product with the output matrix. A soft cap makes ties of large
    logits, so the likeliest id behind it may be another.
    """
    changes = ("logit_scale", "logits_scaling", "final_logit_softcapping")
    output = target.model.get_output_embeddings()
    plain = getattr(output, "bias", None) is None
    return plain and all(getattr(target.config, name, None) is None for name in changes)


def unpacked(linear: nn.Module) -> bool:
    """Whether a layer still has the weight that kernels read (models/linear.py packs it)."""
    return isinstance(linear, nn.Linear)
