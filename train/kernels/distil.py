"""The draft lm_head and its distillation loss in one function, with [rows, draft vocabulary] a
chunk at a time in the forward and in the backward (spec/eagle.md 3.3, 3.8).

All unroll steps come together: rows are sorted by the token whose teacher they read, so that the
teacher's logits of a chunk are made once for all steps. Gradients are made with the loss, while the
logits are there, for weights of the steps that the caller tells beforehand; a backward that
weighs the steps differently makes them again.

Shapes: N rows of all K steps, H head width, H_t target width, n teacher rows, V target and V_d
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headsmith.models.linear import at_least_float32
from headsmith.models.products import Buffer, WeightGradient, add_product, product
from headsmith.train.kernels.distil_rows import Parts, Rows, visit
from headsmith.train.loss import LossSettings


@dataclass(frozen=True, slots=True)
class Chunk:
    """How much exists at a time: at most `columns` draft ids of so many rows that a chunk has
    `elements` logits.
    """

    elements: int
    columns: int

    def sizes(self, vocab: int) -> tuple[int, int]:
        """Rows and columns of a chunk."""
        columns = min(vocab, self.columns)
        return max(1, self.elements // columns), columns


# Few rows a chunk would spend the time on the gradient of the weight, which each chunk adds to;
# few columns on making the logits twice, since the loss needs sums over all of them first.
CPU = Chunk(4 << 20, 1 << 15)
GPU = Chunk(64 << 20, 1 << 17)


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target as the loss reads it: post-norm states `last` [n, H_t], output matrix `weight`
    [V, H_t], what follows it (`finish`, of logits and their ids), the draft `ids` int64 [V_d];
    `logsumexp` [n] over the whole vocabulary and `covered` bool [n], whether the first choice can
    be drafted. `kept`: where rows of the matrix stay for the next step, by dtype, if all draft ids
    are one chunk; a frozen target's are always the same.
    """

    last: Tensor
    weight: Tensor
    ids: Tensor
    finish: Callable[[Tensor, Tensor | slice], Tensor]
    logsumexp: Tensor
    covered: Tensor
    kept: dict[torch.dtype, Tensor] | None = None

    def rows(self, columns: slice, dtype: torch.dtype) -> Tensor:
        """Rows of the output matrix that some columns are, [C, H_t]."""
        if self.kept is None or columns != slice(0, len(self.ids)):
            return self.weight[self.of(columns)].to(dtype)
        if dtype not in self.kept:
            self.kept[dtype] = self.weight[self.of(columns)].to(dtype)
        return self.kept[dtype]

    def of(self, columns: slice) -> Tensor | slice:
        """Target ids of some columns; a slice where they follow each other, which copies no row of
        the matrix.
        """
        first, last = self.ids[[columns.start, columns.stop - 1]].tolist()
        whole = last - first == columns.stop - 1 - columns.start
        return slice(first, last + 1) if whole else self.ids[columns]


@dataclass(frozen=True, slots=True)
class Work:
    """What does not change between visits: the `order` int64 [N] in which rows are sorted and the
    way `back`; of the sorted rows `slots` int64 [N], the teacher's row of each, ascending, and
    `steps` int64 [N], its step.
    """

    teacher: Teacher
    order: Tensor
    back: Tensor
    slots: Tensor
    steps: Tensor
    loss: LossSettings
    chunk: Chunk
    # What products are made in, of the head and of the teacher.
    dtype: torch.dtype
    teacher_dtype: torch.dtype

    def pieces(self, vocab: int) -> Iterator[tuple[slice, list[tuple[slice, Tensor, Tensor]]]]:
        """Chunks: columns, with (rows, teacher rows read, which of them each row reads)."""
        size, columns = self.chunk.sizes(vocab)
        cuts = [slice(a, min(a + size, len(self.slots))) for a in range(0, len(self.slots), size)]
        read = [torch.unique_consecutive(self.slots[c], return_inverse=True) for c in cuts]
        rows = [(cut, *pair) for cut, pair in zip(cuts, read, strict=True)]
        for start in range(0, vocab, columns):
            yield slice(start, min(start + columns, vocab)), rows


@dataclass(frozen=True, slots=True)
class Gradients:
    """By the sorted states [N, H] and by the weight [V_d, H], None where it is not trained. Of one
    chunk of columns (`whole`) a state has its gradient at once, of several their sum.
    """

    states: Tensor
    weight: WeightGradient | None
    whole: bool
    buffer: Buffer

    @classmethod
    def begin(cls, states: Tensor, weight: Tensor, work: Work, trains_weight: bool) -> Gradients:
        """Nothing yet."""
        whole = work.chunk.sizes(len(weight))[1] == len(weight)
        wide = torch.promote_types(states.dtype, torch.float32)
        dtype = work.dtype if whole else wide
        made = states.new_empty if whole else states.new_zeros
        by_weight = WeightGradient(weight, work.dtype) if trains_weight else None
        return cls(made(states.shape, dtype=dtype), by_weight, whole, Buffer())

    def add(self, cut: slice, columns: slice, slope: Tensor, w: Tensor, x: Tensor) -> None:
        """Of the rows `cut` x [m, H] and the columns w [C, H]: the gradient by their logits."""
        if self.whole:
            self.states[cut] = product(slope, w, self.buffer)
        else:
            add_product(self.states[cut], slope, w, self.buffer)
        if self.weight is not None:
            self.weight.add(slope, x, columns)


def distil(
    states: Sequence[Tensor],
    weight: Tensor,
    teacher: Teacher,
    slots: Sequence[Tensor],
    loss: LossSettings,
    weights: Tensor | None = None,
    chunk: Chunk | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Loss sums of K steps, float32 [K] with gradient, and the draft ids (columns) that the rows of
    each would draft, int64 [n_k].

    states: normed outputs [n_k, H] of each step; weight [V_d, H]; slots: the teacher row of each
    row, int64 [n_k]. `weights` [K] are proportional to what the backward will weigh the steps with
    (None: equally); they save work and change no result.
    """
    device, counts = states[0].device, [len(s) for s in states]
    joined = torch.cat(list(slots))
    order = joined.argsort(stable=True)
    steps = torch.arange(len(counts), device=device).repeat_interleave(
        torch.tensor(counts, device=device)
    )
    kind = device.type
    narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=device)
    work = Work(
        teacher,
        order,
        back,
        joined[order],
        steps[order],
        loss,
        chunk or (CPU if kind == "cpu" else GPU),
        narrow or weight.dtype,
        narrow or teacher.last.dtype,
    )
    total = torch.cat(list(states))
    hint = torch.ones(len(counts)) if weights is None else weights
    hint = hint.detach().to(device, at_least_float32(weight.new_empty(0)).dtype)
    trained = torch.is_grad_enabled() and (total.requires_grad or weight.requires_grad)
    rows, choice = Distillation.apply(total, weight, work, hint, trained)
    # In the order of the rows again, so that a step's sum does not depend on how rows are packed.
    sums = [part.sum() for part in rows.index_select(0, back).split(counts)]
    return torch.stack(sums), list(choice[back].split(counts))


class Distillation(torch.autograd.Function):
    """Losses [N] and choices int64 [N] of the sorted rows, from states [N, H] that are not."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, work: Work, hint: Tensor, trained: bool
    ) -> tuple[Tensor, Tensor]:
        # Every row once: the gradient goes the same way back, and adds nothing up.
        states, teacher = states.index_select(0, work.order), work.teacher
        full = teacher.logsumexp[work.slots].to(hint.dtype)
        covered = teacher.covered[work.slots].to(hint.dtype)
        rows = Rows.begin(full, covered, hint[work.steps])
        by_weight = ctx.needs_input_grad[1]
        grads = Gradients.begin(states, weight, work, by_weight) if trained else None
        for parts in visits(work, len(weight), trained):
            sweep(states, weight, work, rows, parts, grads)
        ctx.save_for_backward(states, weight)
        ctx.work, ctx.rows, ctx.grads = work, rows, grads
        ctx.mark_non_differentiable(rows.choice)
        return rows.losses(work.loss), rows.choice

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        work, rows, grads = ctx.work, ctx.rows, ctx.grads
        # Given away, so that the weight's becomes its `.grad` without a copy; a second backward
        # makes them again.
        ctx.grads = None
        factor = None if grads is None else proportion(grad, rows.scale)
        if factor is None:
            grads, factor = Gradients.begin(states, weight, work, ctx.needs_input_grad[1]), 1.0
            parts = Parts(gradient=True)
            sweep(states, weight, work, replace(rows, scale=grad.contiguous()), parts, grads)
        assert grads is not None
        by_states, by_weight = grads.states, None if grads.weight is None else grads.weight.sum()
        if factor != 1.0:
            by_states.mul_(factor)
            by_weight = None if by_weight is None else by_weight.mul_(factor)
        by_weight = None if by_weight is None else by_weight.to(weight.dtype)
        by_states = by_states.to(states.dtype).index_select(0, work.back)
        return by_states, by_weight, None, None, None


def visits(work: Work, vocab: int, trained: bool) -> list[Parts]:
    """How often the chunks are gone through, and what for."""
    if work.chunk.sizes(vocab)[1] == vocab:
        return [Parts(statistics=True, sums=True, gradient=trained)]
    if work.loss.name == "kl":
        return [Parts(statistics=True), Parts(sums=True, gradient=trained)]
    later = [Parts(gradient=True)] if trained else []
    return [Parts(statistics=True), Parts(sums=True), *later]


def sweep(
    states: Tensor,
    weight: Tensor,
    work: Work,
    rows: Rows,
    parts: Parts,
    grads: Gradients | None,
) -> None:
    """Visit every chunk once; with `parts.gradient` add up `grads`."""
    teacher = work.teacher
    with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
        for columns, pieces in work.pieces(len(weight)):
            ids = teacher.of(columns)
            w = weight[columns].to(work.dtype)
            theirs = teacher.rows(columns, work.teacher_dtype)
            of_teacher, of_head = Buffer(), Buffer()
            for cut, read, place in pieces:
                x = states[cut].to(work.dtype)
                last = teacher.last[read].to(work.teacher_dtype)
                said = product(last, theirs.T, of_teacher)
                said = teacher.finish(at_least_float32(said), ids)
                logits = product(x, w.T, of_head)
                part = rows.part(cut)
                slope = visit(logits, said, place, part, columns.start, work.loss, parts)
                if parts.gradient and grads is not None:
                    grads.add(cut, columns, slope, w, x)


def proportion(grad: Tensor, scale: Tensor) -> float | None:
    """The number that `grad` [N] is `scale` [N] times, or None."""
    if len(grad) == 0:
        return 1.0
    ratios = (grad / scale).aminmax()
    low, high = torch.stack([ratios.min, ratios.max]).tolist()
    # What a product in another order may differ by.
    near = 4 * torch.finfo(grad.dtype).eps * abs(high)
    return high if high - low <= near else None
