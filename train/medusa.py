"""Medusa heads in training (spec/medusa.md 2.1, 2.2, 2.5): all heads on the frozen target's last
states, one chunk of rows and one head at a time.

Row i and head k are row i and step k of the unroll (headsmith/train/unroll.py): the head reads the
last state of x[i] and predicts x[i+2+k], its teacher is the target's distribution at x[i+1+k], and
the row counts when x[i+1] .. x[i+2+k] are trained tokens of one document. Only the state differs: a
head sees no token behind x[i].

Shapes: n_k loss rows of head k, K heads, H width, V_d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headsmith.models.linear import at_least_float32
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target
from headsmith.train.loss import KlOverDraftIds, LossSettings
from headsmith.train.unroll import TrainRow, UnrollResult, tally

# Teacher positions whose logits exist at a time: [CHUNK, V_d] of the teacher and of one head.
CHUNK = 256


def medusa_losses(
    head: MedusaHead,
    target: Target,
    row: TrainRow,
    steps: int,
    settings: LossSettings | None = None,
) -> UnrollResult:
    """Losses and counts of all heads over one packed row; `steps` is their number."""
    assert steps == head.config.num_heads, "every head is trained in every step"
    pieces = Pieces(head, target, row, settings or LossSettings())
    last = row.last[row.slot[row.rows[0]]].to(next(head.parameters()).dtype)
    places = [torch.searchsorted(row.rows[0], rows) for rows in row.rows]
    states = [head.state(k, last[place]) for k, place in enumerate(places)]
    weights = [module.weight for module in head.own_lm_heads()]
    losses = LossInPieces.apply(pieces, *states, *weights)
    return tally(row, losses, pieces.rights)


class Pieces:
    """The rows of a packed row, cut so that the teacher's logits of a piece are made once for all
    heads. `rights` [K] bool [n_k] fills while they are walked through.
    """

    def __init__(
        self, head: MedusaHead, target: Target, row: TrainRow, settings: LossSettings
    ) -> None:
        self.head, self.target, self.row, self.settings = head, target, row, settings
        self.slots = [row.slot[rows + 1 + k] for k, rows in enumerate(row.rows)]
        self.labels = [_drafted(head, row.ids[rows + 2 + k]) for k, rows in enumerate(row.rows)]
        self.rights = [torch.zeros_like(rows, dtype=torch.bool) for rows in row.rows]
        self.full = len(head.draft_ids) == target.vocab_size

    def __iter__(self) -> Iterator[tuple[int, slice, Callable[[Tensor], Tensor]]]:
        """(head, its rows, the loss sum of their states) of every piece."""
        for start in range(0, len(self.row.last), CHUNK):
            bounds = torch.tensor([start, start + CHUNK], device=self.row.slot.device)
            ids = slice(None) if self.full else self.head.draft_ids
            with torch.no_grad():
                teacher = self.target.logits_of(self.row.last[start : start + CHUNK], ids)
            for k, slots in enumerate(self.slots):
                # Slots ascend with the rows, so the rows of a piece are consecutive.
                first, end = torch.searchsorted(slots, bounds).tolist()
                if end > first:
                    yield k, slice(first, end), self._loss(k, slice(first, end), teacher, start)

    def _loss(self, k: int, rows: slice, teacher: Tensor, start: int) -> Callable[[Tensor], Tensor]:
        slots, settings = self.slots[k][rows], self.settings

        def loss(states: Tensor) -> Tensor:
            logits = at_least_float32(self.head.logits(k, states, self.target))
            drafted = self.head.draft_ids[logits.detach().argmax(-1)]
            self.rights[k][rows] = drafted == self.row.choice[slots]
            share = {"ce": 1.0, "kl": 0.0}.get(settings.name, settings.ce_weight)
            total = logits.new_zeros(())
            if share > 0:
                labels = self.labels[k][rows]
                ce = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-1)
                total = total + share * ce
            if share < 1:
                kl = KlOverDraftIds.apply(logits, teacher[slots - start])
                # As in step_loss: a row whose first choice cannot be drafted teaches nothing good.
                total = total + (1 - share) * (kl * self.row.covered[slots]).sum()
            return total

        return loss


def _drafted(head: MedusaHead, ids: Tensor) -> Tensor:
    """Rows of the lm_head for target ids [n]; -1 for what cannot be drafted."""
    table = torch.full((head.config.vocab_size,), -1, device=ids.device)
    table[head.draft_ids] = torch.arange(len(head.draft_ids), device=ids.device)
    return table[ids]


class LossInPieces(torch.autograd.Function):
    """Loss sums [K] of the heads' states, with gradients that are made piece by piece on the way:
    no more than one piece's logits exist at a time, in the forward and in the backward.
    """

    @staticmethod
    def forward(ctx: Any, pieces: Pieces, *inputs: Tensor) -> Tensor:
        count = len(pieces.slots)
        states, weights = inputs[:count], inputs[count:]
        trained = any(ctx.needs_input_grad)
        sums = [at_least_float32(states[0].new_zeros(())) for _ in range(count)]
        grads = [torch.zeros_like(state) for state in states] if trained else []
        # One gradient a head of a truncated lm_head too: their losses are weighed differently.
        own: list[Tensor | None] = [None] * (count if weights else 0)
        for k, rows, loss in pieces:
            with torch.set_grad_enabled(trained):
                part = states[k][rows].detach().requires_grad_(trained)
                value = loss(part)
            sums[k] = sums[k] + value.detach()
            if trained:
                read = [weights[k if len(weights) > 1 else 0]] if weights else []
                grad, *more = torch.autograd.grad(value, [part, *read])
                grads[k][rows] = grad
                if more:
                    kept = own[k]
                    own[k] = more[0] if kept is None else kept.add_(more[0])
        ctx.grads, ctx.weights = grads, len(weights)
        # Every rank must have a gradient of every weight to exchange.
        ctx.own = [torch.zeros_like(weights[0]) if g is None else g for g in own]
        return torch.stack(sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scales = grad.unbind()
        states = [g * scale.to(g.dtype) for g, scale in zip(ctx.grads, scales, strict=True)]
        own = [g * scale.to(g.dtype) for g, scale in zip(ctx.own, scales, strict=bool(ctx.own))]
        if ctx.weights == 1:
            own = [torch.stack(own).sum(0)]
        return None, *states, *own
