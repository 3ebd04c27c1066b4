"""What training reads of the target in a packed row: its taps at every token, and, where a loss
looks, its last state, its first choice and the normaliser of its distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headsmith.data.pack import Row
from headsmith.models.target import Target

# Rows of full-vocabulary logits that exist at a time while the teacher is read.
_TEACHER_CHUNK = 256


@dataclass(slots=True)
class States:
    """Of a packed row of T tokens, n of which `read_tokens` names: taps [T, m, H], last [n, H]
    behind the final norm, choice int64 [n] and logsumexp float32 [n] over the whole vocabulary.
    """

    taps: Tensor
    last: Tensor
    choice: Tensor
    logsumexp: Tensor

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.taps).all() and torch.isfinite(self.last).all())


def read_tokens(row: Row) -> Tensor:
    """Tokens of a row whose last state something reads, int64 [n] ascending; prompts have none.

    A loss counts at row i when x[i+1] and x[i+2] are trained tokens of its document. Its teacher
    speaks at token i+1, later steps read a subset of these, and Medusa heads stand on token i.
    """
    total, documents, mask = len(row.ids), row.documents, row.mask.bool()
    ends = max(total - 2, 0)
    read = torch.zeros(total + 1, dtype=torch.bool)
    counts = mask[1 : ends + 1] & mask[2:] & (documents[:ends] == documents[2:])
    read[:ends] |= counts
    read[1 : ends + 1] |= counts
    return read[:total].nonzero().flatten()


@torch.no_grad()
def states_of(target: Target, row: Row, taps: tuple[int, ...], shared: int = 0) -> States:
    """One pass of the target over a row. `shared`: how many tokens all documents begin with."""
    features = target.features(row.ids.to(target.device), row.lengths, taps, shared)
    last = features.last[read_tokens(row).to(target.device)].clone()
    # Out of inference mode, so that autograd may save them.
    return States(features.taps.clone(), last, *teacher_of(target, last))


@torch.no_grad()
def teacher_of(target: Target, last: Tensor) -> tuple[Tensor, Tensor]:
    """First choice int64 [n] and logsumexp float32 [n] of last states [n, H], a chunk of rows at a
    time.
    """
    if not len(last):
        return torch.empty(0, dtype=torch.int64, device=last.device), last.new_empty(0).float()
    choices, sums = [], []
    for chunk in last.split(_TEACHER_CHUNK):
        logits = target.logits(chunk)
        choices.append(logits.argmax(-1))
        sums.append(logits.logsumexp(-1))
    return torch.cat(choices), torch.cat(sums)
