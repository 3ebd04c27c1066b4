"""The kernel of one chunk of logits: a program a row, which reads it up to three times (the second
and third time from the cache) and leaves the gradient where the logits were.
"""

import triton
import triton.language as tl
from torch import Tensor

from headsmith.inference.kernels.aot import Specimen
from headsmith.inference.kernels.tile_triton import narrow
from headsmith.train.kernels.distil_rows import Parts, Rows
from headsmith.train.loss import LossSettings

BLOCK = 1024


@triton.jit
def _merge(known, top, total):
    """log(exp(known) + exp(top) total); known may be -inf."""
    found = top + tl.log(total)
    high = tl.maximum(known, found)
    return high + tl.log(tl.exp(known - high) + tl.exp(found - high))


@triton.jit
def _visit_kernel(
    logits,
    teacher,
    slots,
    full,
    covered,
    scale,
    lse,
    teacher_lse,
    best,
    choice,
    kl,
    alpha,
    below,
    columns,
    first,
    kl_scale,
    kl_decay,
    LK: tl.constexpr,
    STATISTICS: tl.constexpr,
    SUMS: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mine = logits + row * columns
    theirs = teacher + tl.load(slots + row) * columns
    here = tl.arange(0, BLOCK)
    own, other = tl.load(lse + row), tl.load(teacher_lse + row)
    if STATISTICS:
        # Every lane keeps maxima and sums of its own; finite, so that no difference is NaN.
        top = tl.full([BLOCK], -1e38, tl.float32)
        high = tl.full([BLOCK], -1e38, tl.float32)
        where = tl.zeros([BLOCK], tl.int32)
        total = tl.zeros([BLOCK], tl.float32)
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            real = start + here < columns
            s = tl.load(mine + start + here, mask=real, other=float("-inf")).to(tl.float32)
            t = tl.load(theirs + start + here, mask=real, other=float("-inf")).to(tl.float32)
            where = tl.where(s > top, start + here, where)
            higher = tl.maximum(top, s)
            total = total * tl.exp(top - higher) + tl.exp(s - higher)
            top = higher
            higher = tl.maximum(high, t)
            mass = mass * tl.exp(high - higher) + tl.exp(t - higher)
            high = higher
        peak = tl.max(top, 0)
        own = _merge(own, peak, tl.sum(total * tl.exp(top - peak), 0))
        crest = tl.max(high, 0)
        other = _merge(other, crest, tl.sum(mass * tl.exp(high - crest), 0))
        tl.store(lse + row, own)
        tl.store(teacher_lse + row, other)
        # Of equal logits the lower id.
        column = tl.min(tl.where(top == peak, where, columns), 0)
        if peak > tl.load(best + row):
            tl.store(best + row, peak)
            tl.store(choice + row, (column + first).to(tl.int64))
    if SUMS or GRADIENT:
        counts = tl.load(covered + row)
        rest = tl.exp(other - tl.load(full + row))
        overlap, under = tl.load(alpha + row), tl.load(below + row)
    if SUMS:
        gain = tl.zeros([BLOCK], tl.float32)
        lap = tl.zeros([BLOCK], tl.float32)
        low = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            real = start + here < columns
            log_q = tl.load(mine + start + here, mask=real, other=0.0).to(tl.float32) - own
            log_p = tl.load(theirs + start + here, mask=real, other=0.0).to(tl.float32) - other
            p = tl.exp(log_p)
            gain += tl.where(real, p * (log_p - log_q), 0.0)
            if LK:
                q = tl.exp(log_q)
                lap += tl.where(real, tl.minimum(q, p * rest), 0.0)
                low += tl.where(real & (q < p * rest), q, 0.0)
        tl.store(kl + row, tl.load(kl + row) + tl.sum(gain, 0))
        if LK:
            overlap += tl.sum(lap, 0)
            under += tl.sum(low, 0)
            tl.store(alpha + row, overlap)
            tl.store(below + row, under)
    if GRADIENT:
        factor = tl.load(scale + row)
        weight = counts
        if LK:
            weight = counts * kl_scale * tl.exp(-kl_decay * overlap)
        for start in range(0, columns, BLOCK):
            real = start + here < columns
            s = tl.load(mine + start + here, mask=real, other=0.0).to(tl.float32)
            t = tl.load(theirs + start + here, mask=real, other=0.0).to(tl.float32)
            q, p = tl.exp(s - own), tl.exp(t - other)
            slope = weight * (q - p)
            if LK:
                slope -= (1.0 - weight) * q * (tl.where(q < p * rest, 1.0, 0.0) - under)
            tl.store(
                mine + start + here, narrow(slope * factor, logits.dtype.element_ty), mask=real
            )


def launch(
    logits: Tensor,
    teacher: Tensor,
    slots: Tensor,
    rows: Rows,
    first: int,
    loss: LossSettings,
    parts: Parts,
) -> Tensor:
    """distil_rows.reference in one launch; the gradient has the dtype of the logits."""
    count, columns = logits.shape
    assert logits.is_contiguous() and teacher.is_contiguous(), "a chunk lies in one piece"
    if count:
        _visit_kernel[(count,)](
            logits,
            teacher,
            slots,
            rows.full,
            rows.covered,
            rows.scale,
            rows.lse,
            rows.teacher_lse,
            rows.best,
            rows.choice,
            rows.kl,
            rows.alpha,
            rows.below,
            columns,
            first,
            float(loss.kl_scale),
            float(loss.kl_decay),
            LK=loss.name == "lk",
            STATISTICS=parts.statistics,
            SUMS=parts.sums,
            GRADIENT=parts.gradient,
            BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
            num_warps=8,
        )
    return logits


def specimens() -> list[Specimen]:
    """A chunk in one visit, and in the visits of several chunks; bfloat16 logits."""
    signature = {
        "logits": "*bf16",
        "teacher": "*fp32",
        "slots": "*i64",
        **dict.fromkeys(("full", "covered", "scale", "lse", "teacher_lse", "best"), "*fp32"),
        "choice": "*i64",
        **dict.fromkeys(("kl", "alpha", "below"), "*fp32"),
        **dict.fromkeys(("columns", "first"), "i32"),
        **dict.fromkeys(("kl_scale", "kl_decay"), "fp32"),
    }
    found = []
    for name, statistics, sums, gradient in (
        ("whole", True, True, True),
        ("statistics", True, False, False),
        ("sums", False, True, False),
        ("gradient", False, False, True),
    ):
        for lk in (False, True):
            constexprs: dict[str, object] = {
                "LK": lk,
                "STATISTICS": statistics,
                "SUMS": sums,
                "GRADIENT": gradient,
                "BLOCK": BLOCK,
            }
            label = f"distil_rows.{name}_{'lk' if lk else 'kl'}"
            found.append(Specimen(label, _visit_kernel, signature, constexprs, 8, 2))
    return found
