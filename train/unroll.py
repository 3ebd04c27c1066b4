"""The unroll: K steps over the head's own states, all rows in parallel, as decoding will run them
(spec/eagle.md 3.1, 3.2).

At step k row i reads the embedding of x[i+1+k] and, from the second step on, its own previous
output; it attends to the step-0 keys of rows up to i and to its own keys of steps 1..k, and
predicts x[i+2+k]. The rows whose loss counts are nested from step to step, so queries, MLP, lm_head
and loss run on those only; the others give step-0 keys and values.

Shapes: T tokens of a packed row, n_k loss rows of step k, m taps, H width, h heads, g key/value
heads, d head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headsmith.data.pack import Row
from headsmith.data.states import States, read_tokens, states_of
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target
from headsmith.train.kernels.distil import Teacher, distil
from headsmith.train.kernels.unroll_attention import unroll_attention
from headsmith.train.layer import UnrollLayer, take
from headsmith.train.loss import LossSettings
from headsmith.train.pointwise import rms_norm
from headsmith.train.shared import product_dtype
from headsmith.train.stages import backward_from, stage


def loss_rows(row: Row, steps: int) -> list[Tensor]:
    """Indices, int64 [n_k] ascending, of the rows whose loss counts at each step.

    Row i counts at step k when x[i+1] .. x[i+2+k] are all trained tokens of one document: the
    strict mask of spec 3.1, which has the first draft of every answer and nothing that decoding
    never asks for.
    """
    total, documents = len(row.ids), row.documents
    valid = torch.ones(total, dtype=torch.bool)
    rows = []
    for ahead in range(1, steps + 2):
        reached = torch.zeros(total, dtype=torch.bool)
        same = documents[ahead:] == documents[: max(total - ahead, 0)]
        reached[: max(total - ahead, 0)] = row.mask[ahead:].bool() & same
        valid = valid & reached
        if ahead >= 2:
            rows.append(valid.nonzero().flatten())
    return rows


@dataclass(slots=True)
class TrainRow:
    """A packed row with what the target says of it; the same for every epoch.

    taps [T, m, H]. rows: see `loss_rows`. Teacher of token position t, for the n_t positions of
    `read_tokens`: last [n_t, H], first choice int64 [n_t] and logsumexp float32 [n_t] over the
    whole vocabulary, covered bool [n_t]; `slot` int64 [T] is where position t is among them.
    """

    ids: Tensor
    lengths: list[int]
    taps: Tensor
    rows: list[Tensor]
    slot: Tensor
    last: Tensor
    choice: Tensor
    logsumexp: Tensor
    covered: Tensor

    _TENSORS = ("ids", "taps", "slot", "last", "choice", "logsumexp", "covered")

    @property
    def nbytes(self) -> int:
        tensors = [*(getattr(self, name) for name in self._TENSORS), *self.rows]
        return sum(t.numel() * t.element_size() for t in tensors)

    def to(self, device: torch.device | str) -> "TrainRow":
        moved = {name: getattr(self, name).to(device) for name in self._TENSORS}
        return replace(self, rows=[r.to(device) for r in self.rows], **moved)


def prepare_row(
    target: Target,
    draft_ids: Tensor,
    row: Row,
    taps: tuple[int, ...],
    steps: int,
    shared: int = 0,
) -> TrainRow:
    """One target pass over a packed row (`states_of`), ready to train on."""
    return train_row(row, states_of(target, row, taps, shared), draft_ids, steps)


def train_row(row: Row, states: States, draft_ids: Tensor, steps: int) -> TrainRow:
    """A packed row and the target's states of it, on their device."""
    device = states.last.device
    positions = read_tokens(row)
    slot = torch.full((len(row.ids),), -1)
    slot[positions] = torch.arange(len(positions))
    return TrainRow(
        ids=row.ids.to(device),
        lengths=row.lengths,
        taps=states.taps,
        rows=[r.to(device) for r in loss_rows(row, steps)],
        slot=slot.to(device),
        last=states.last,
        choice=states.choice,
        logsumexp=states.logsumexp,
        covered=torch.isin(states.choice, draft_ids.to(device)),
    )


def unroll(head: Eagle3Head, target: Target, row: TrainRow, steps: int) -> Iterator[Tensor]:
    """The head's output g [n_k, H] of each step, with gradient through the states that are fed
    back.
    """
    starts = torch.tensor([0, *row.lengths[:-1]], device=row.ids.device).cumsum(0)
    lengths = torch.tensor(row.lengths, device=row.ids.device)
    document_starts = starts.repeat_interleave(lengths)
    positions = torch.arange(len(row.ids), device=row.ids.device) - document_starts
    z = head.fuse(row.taps.to(head.fc.weight.dtype))
    embeds = head.embed(target, row.ids).to(z.dtype)
    layer = UnrollLayer(head.midlayer, embeds, queried(row, steps))
    normed = layer.norm(z)
    # The last row of a document reads a token of the next one; no loss row ever attends to it.
    following = torch.arange(len(row.ids), device=row.ids.device).roll(-1)
    keys, values = layer.key_value(normed, following, *head.cos_sin(positions))
    own: list[tuple[Tensor, Tensor]] = []
    g = z
    for k in range(steps):
        rows = row.rows[k]
        cos_sin = head.cos_sin(positions[rows] + k)
        if k == 0:
            z, normed = take(z, rows), take(normed, rows)
            query = layer.query(normed, rows + 1, *cos_sin)
        else:
            # Rows are nested, so this step's rows are found among the previous step's.
            kept = torch.searchsorted(row.rows[k - 1], rows)
            z = head.feedback(take(g, kept))
            own = [(take(key, kept, 1), take(value, kept, 1)) for key, value in own]
            normed = layer.norm(z)
            query, latest = layer.query_key_value(normed, rows + 1 + k, *cos_sin)
            own.append(latest)
        attended = unroll_attention(
            query, keys, values, own, rows, row.lengths, head.config.sliding_window
        )
        g = layer.output(z, normed, attended)
        yield g


def queried(row: TrainRow, steps: int) -> Tensor:
    """Places of the tokens that a query is made with at any step, int64 ascending."""
    reads = torch.zeros(len(row.ids), dtype=torch.bool, device=row.ids.device)
    for k in range(steps):
        reads[row.rows[k] + 1 + k] = True
    return reads.nonzero().flatten()


@dataclass(slots=True)
class UnrollResult:
    """Sums over the rows of one packed row, a value a step [K]. `loss_sums` has a gradient, the
    rest are counts.

    correct: the head's first choice is the target's, over its whole vocabulary. joint_correct: so
    it was at all steps so far. covered: the target's first choice can be drafted. `run` int64 [n_0]
    is how many steps in a row were right from each row of step 0 on: what a chain drafted there
    would have had accepted.
    """

    loss_sums: Tensor
    rows: Tensor
    correct: Tensor
    joint_correct: Tensor
    covered: Tensor
    run: Tensor


def unroll_losses(
    head: Eagle3Head,
    target: Target,
    row: TrainRow,
    steps: int,
    settings: LossSettings | None = None,
    weights: Tensor | None = None,
    kept: dict[torch.dtype, Tensor] | None = None,
) -> UnrollResult:
    """Losses and counts of all steps over one packed row. `weights` [K]: what the steps will be
    weighed with, if that is known; `kept`: what the next row can use again of this target and these
    draft ids (`headsmith.train.kernels.distil`, both).
    """
    outputs, following = [], unroll(head, target, row, steps)
    for k in range(steps):
        with stage(f"unroll step {k + 1}"):
            outputs.append(next(following))
        backward_from(outputs[k], f"backward step {k + 1}")
    slots = [row.slot[row.rows[k] + 1 + k] for k in range(steps)]
    teacher = Teacher(
        row.last,
        target.head_weight,
        head.draft_ids,
        target.after_head,
        row.logsumexp,
        row.covered,
        kept,
    )
    states = [rms_norm(g, head.norm, product_dtype(g)) for g in outputs]
    losses, drafted = distil(
        states, head.lm_head.weight, teacher, slots, settings or LossSettings(), weights
    )
    rights = [
        head.draft_ids[column] == row.choice[slot]
        for column, slot in zip(drafted, slots, strict=True)
    ]
    return tally(row, losses, rights)


def tally(row: TrainRow, loss_sums: Tensor, rights: Sequence[Tensor]) -> UnrollResult:
    """The result of a packed row from its loss sums [K] and, for every step, which rows bool [n_k]
    were right.
    """
    counts = []
    run = torch.zeros(len(row.rows[0]), dtype=torch.int64, device=row.ids.device)
    for k, right in enumerate(rights):
        place = torch.searchsorted(row.rows[0], row.rows[k])
        joint = right & (run[place] == k)
        run[place] += joint.long()
        number = torch.tensor(len(right), device=right.device)
        covered = row.covered[row.slot[row.rows[k] + 1 + k]]
        counts.append(torch.stack([number, right.sum(), joint.sum(), covered.sum()]))
    rows, correct, joint_correct, covered_rows = torch.stack(counts, 1)
    return UnrollResult(loss_sums, rows, correct, joint_correct, covered_rows, run)
