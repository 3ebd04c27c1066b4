"""One chunk of logits against one chunk of the teacher's: statistics, loss and gradient of its rows
(spec/eagle.md 3.3), and the plain reference.

Shapes: m rows, u teacher rows, C columns of the chunk (draft ids first .. first + C).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headsmith.inference.kernels import use_kernels
from headsmith.models.linear import at_least_float32
from headsmith.train.loss import LossSettings

# Logits that are gone through at a time on a CPU: what several passes find in the cache again.
_BLOCK = 1 << 17
# Columns among which a maximum is found before its place is.
_SPAN = 128


@dataclass(frozen=True, slots=True)
class Parts:
    """What a visit of a chunk does. The sums need the statistics of all chunks, and the gradient
    of loss `lk` needs the sums of all.
    """

    statistics: bool = False
    sums: bool = False
    gradient: bool = False


@dataclass(slots=True)
class Rows:
    """What is known of m rows; every tensor [m], float32 (float64 where the logits are).

    Given: `full` log-sum-exp of the target over its whole vocabulary, `covered` 1 where its first
    choice can be drafted and else 0, `scale` what the row's loss counts in the gradient.
    Statistics: `lse` and `teacher_lse` over the draft ids, `best` logit, `choice` int64 its column.
    Sums: `kl`, and for lk `alpha` = sum of min(p, q) and `below` = the sum of q where it is below
    p, p not renormalised over the draft ids.
    """

    full: Tensor
    covered: Tensor
    scale: Tensor
    lse: Tensor
    teacher_lse: Tensor
    best: Tensor
    choice: Tensor
    kl: Tensor
    alpha: Tensor
    below: Tensor

    @classmethod
    def begin(cls, full: Tensor, covered: Tensor, scale: Tensor) -> Rows:
        """Rows of which nothing is known yet."""
        low, zero = torch.full_like(full, -torch.inf), torch.zeros_like(full)
        choice = torch.zeros_like(full, dtype=torch.int64)
        sums = (zero, zero.clone(), zero.clone())
        return cls(full, covered, scale, low, low.clone(), low.clone(), choice, *sums)

    def part(self, rows: slice) -> Rows:
        """Some of the rows, as views."""
        return Rows(*(getattr(self, name)[rows] for name in self.__slots__))

    def weight(self, loss: LossSettings) -> Tensor:
        """What the KL counts in a row's loss; see `losses`."""
        if loss.name == "kl":
            return self.covered
        return loss.kl_scale * torch.exp(-loss.kl_decay * self.alpha) * self.covered

    def losses(self, loss: LossSettings) -> Tensor:
        """The loss of each row, as `headsmith.train.loss.step_loss` defines it."""
        weight = self.weight(loss)
        if loss.name == "kl":
            # Not a product: a KL that is infinite must not count where it is not trained.
            return self.kl.masked_fill(weight == 0, 0.0)
        return weight * self.kl + (1 - weight) * (1 - self.alpha)


def visit(
    logits: Tensor,
    teacher: Tensor,
    slots: Tensor,
    rows: Rows,
    first: int,
    loss: LossSettings,
    parts: Parts,
) -> Tensor:
    """Take a chunk into `rows`, in place; with `parts.gradient` return the gradient by the logits,
    in their dtype.

    logits [m, C], which are overwritten; teacher [u, C] the target's logits of the same ids; slots
    int64 [m] the teacher's row of each row; `first` the draft id of the first column.
    """
    if use_kernels(logits.device):
        from headsmith.train.kernels.distil_rows_triton import launch

        return launch(logits, teacher, slots, rows, first, loss, parts)
    return reference(logits, teacher, slots, rows, first, loss, parts)


def reference(
    logits: Tensor,
    teacher: Tensor,
    slots: Tensor,
    rows: Rows,
    first: int,
    loss: LossSettings,
    parts: Parts,
) -> Tensor:
    """The same in plain PyTorch; `teacher` is overwritten too."""
    said = Said.of(at_least_float32(teacher), slots, rows, parts)
    size = max(1, _BLOCK // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    for begin in range(0, len(logits), size):
        block = slice(begin, begin + size)
        narrow = logits[block]
        wide = at_least_float32(narrow)
        _take(wide, said, slots[block], rows.part(block), first, loss, parts)
        if parts.gradient and wide is not narrow:
            narrow.copy_(wide)
    return logits


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row [m, C] and the first column that has it, int64 [m]."""
    count, columns = logits.shape
    if logits.device.type != "cpu" or columns % _SPAN:
        return logits.max(-1)
    # On a CPU a maximum without its place is many times faster: first of spans, then in one.
    top, span = logits.view(count, -1, _SPAN).amax(-1).max(-1)
    found = logits.view(-1, _SPAN)[torch.arange(0, count) * (columns // _SPAN) + span]
    return top, found.argmax(-1) + span * _SPAN


@dataclass(frozen=True, slots=True)
class Said:
    """The teacher's share of a chunk, once for all rows that read it: its probabilities p [u, C],
    their sum and that of p log p [u].
    """

    p: Tensor
    mass: Tensor
    negative_entropy: Tensor

    @classmethod
    def of(cls, teacher: Tensor, slots: Tensor, rows: Rows, parts: Parts) -> Said:
        """From logits [u, C], which are overwritten; every one of them is read by some row."""
        top = teacher.amax(-1)
        below = teacher.sub_(top[:, None])
        p = below.exp()
        mass = p.sum(-1)
        if parts.statistics:
            found = mass.log() + top
            torch.logaddexp(rows.teacher_lse, found[slots], out=rows.teacher_lse)
        # Over all chunks, as every row knows it that reads this one.
        lse = rows.teacher_lse.new_empty(len(teacher))
        lse[slots] = rows.teacher_lse
        down = top - lse
        factor = down.exp()
        mass *= factor
        negative_entropy = below.mul_(p).sum(-1).mul_(factor).addcmul_(down, mass)
        return cls(p.mul_(factor[:, None]), mass, negative_entropy)


def _take(
    logits: Tensor,
    said: Said,
    slots: Tensor,
    rows: Rows,
    first: int,
    loss: LossSettings,
    parts: Parts,
) -> None:
    """`reference` of some rows: their logits become the gradient, in place."""
    shift = rows.lse
    if parts.statistics:
        shift, column = best(logits)
        rows.choice.copy_(torch.where(shift > rows.best, column + first, rows.choice))
        torch.maximum(rows.best, shift, out=rows.best)
    logits.sub_(shift[:, None])
    reads = parts.sums or parts.gradient
    p = said.p.index_select(0, slots) if reads else None
    dot = (p * logits).sum(-1) if p is not None and parts.sums else None
    q = logits.exp_()
    if parts.statistics:
        torch.logaddexp(rows.lse, q.sum(-1).log_().add_(shift), out=rows.lse)
    if p is None:
        return
    # With the statistics in the same visit the softmax is finished by a factor.
    beyond = rows.lse - shift
    factor = beyond.neg().exp() if parts.statistics else torch.ones_like(shift)
    if dot is not None:
        # p (log p - log q), summed; log q is logits - beyond.
        rows.kl += said.negative_entropy[slots] + said.mass[slots] * beyond - dot
    if loss.name == "kl":
        if parts.gradient:
            weight = rows.covered * rows.scale
            q.mul_((factor * weight)[:, None]).addcmul_(p, weight[:, None], value=-1)
        return
    q.mul_(factor[:, None])
    likely = p.mul_((rows.teacher_lse - rows.full).exp()[:, None])
    under = q < likely
    if parts.sums:
        rows.alpha += torch.minimum(q, likely).sum(-1)
        rows.below += (q * under).sum(-1)
    if parts.gradient:
        weight = rows.weight(loss)[:, None]
        p = said.p.index_select(0, slots)
        # alpha grows with the logits whose q is below p, at the cost of all others.
        grows = q * (under.to(q.dtype) - rows.below[:, None])
        q.copy_((weight * (q - p) - (1 - weight) * grows) * rows.scale[:, None])
