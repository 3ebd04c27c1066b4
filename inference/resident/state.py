"""What rounds on the device read and leave behind, at addresses that never change.

Shapes: B requests of a bucket, N nodes of a tree (its root included), P tokens of the longest path
(the root included, or the target's own last), m taps, H target width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headsmith.inference.active import Active
from headsmith.inference.kernels.tree_build import Trees
from headsmith.models.target import Target

# accepted, committed, reason, depth of the tree; then P nodes of the path and P tokens behind it.
COUNTS = 4
# Tokens of what fills up: the root, and one before it whose states a head has read.
SHORTEST = 2


@dataclass(frozen=True, slots=True)
class State:
    """Of each request: its `slots`, whether it is `live` (1) or fills the bucket up (0), the tokens
    of its prompt and answer (`lengths`) and of its answer alone (`written`), int64 [B] all.

    What it committed last: `counts` int64 [B] tokens, `tokens` int64 [B, P], whose states are the
    `rows` int64 [B, P] of `taps` [B * N, m, H] and `last` [B * N, H]; the last of the tokens is the
    root of `tree`. `noise` float32 [B * P, V] is what rule `sample` draws with, a row a depth.
    `record` int64 [B, COUNTS + 2 P] is all that the host reads.
    """

    slots: Tensor
    live: Tensor
    lengths: Tensor
    written: Tensor
    counts: Tensor
    tokens: Tensor
    rows: Tensor
    taps: Tensor
    last: Tensor
    tree: Trees
    noise: Tensor | None
    record: Tensor

    @classmethod
    def empty(
        cls, target: Target, taps: int, sizes: tuple[int, int, int], spare: int, drawn: bool
    ) -> State:
        """Nothing but requests that fill up, in the cache's slot `spare`; `sizes` are B, N, P."""
        batch, nodes, path = sizes
        device, dtype, width = target.device, target.dtype, target.hidden_size

        def numbers(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        def states(*shape: int) -> Tensor:
            return torch.zeros(*shape, width, dtype=dtype, device=device)

        tree = Trees(
            numbers(batch, nodes),
            numbers(batch, nodes).int(),
            numbers(batch, nodes),
            numbers(batch, nodes),
        )
        noise = torch.zeros(batch * path, target.vocab_size, device=device) if drawn else None
        return cls(
            numbers(batch, value=spare),
            numbers(batch),
            numbers(batch, value=SHORTEST),
            numbers(batch),
            numbers(batch, value=1),
            numbers(batch, path),
            numbers(batch, path),
            states(batch * nodes, taps),
            states(batch * nodes),
            tree,
            noise,
            numbers(batch, COUNTS + 2 * path),
        )

    @property
    def path(self) -> int:
        """P."""
        return self.tokens.shape[1]

    @property
    def starts(self) -> Tensor:
        """The root's row in the cache, int64 [B]: what lies before it is committed."""
        return self.lengths - 1

    @property
    def roots(self) -> Tensor:
        """The root of each tree, int64 [B]."""
        return self.tokens.gather(1, self.counts[:, None] - 1)[:, 0]

    @property
    def newest(self) -> Tensor:
        """The row of the state that each root was chosen from, int64 [B]."""
        return self.rows.gather(1, self.counts[:, None] - 1)[:, 0]

    def load(self, active: Sequence[Active], spare: int) -> None:
        """Take over requests as the host knows them; each has an update of at most P tokens."""
        path, batch = self.path, len(self.slots)
        table: list[list[int]] = []
        parts: list[Tensor] = []
        last: list[Tensor] = []
        ends: list[int] = []
        for a in active:
            update = a.update
            assert update is not None and update.last is not None and len(update.tokens) <= path
            count, first = len(update.tokens), sum(len(part) for part in parts)
            padding = [0] * (path - count)
            rows = list(range(first, first + count))
            numbers = [a.slot, 1, a.length, len(a.output), count]
            table.append([*numbers, *update.tokens, *padding, *rows, *padding])
            parts.append(update.taps)
            last.append(update.last)
            ends.append(rows[-1])
        nobody = [spare, 0, SHORTEST, 0, 1, *[0] * (2 * path)]
        table += [nobody] * (batch - len(active))
        # The states of this round may be rows of these very buffers: all are read before any is
        # written.
        taps, newest = torch.cat(parts), torch.stack(last)
        self.taps[: len(taps)] = taps
        self.last[torch.tensor(ends, device=newest.device)] = newest
        numbers_now = torch.tensor(table, device=self.slots.device)
        columns = (self.slots, self.live, self.lengths, self.written, self.counts)
        for column, values in zip(columns, numbers_now.unbind(1), strict=False):
            column.copy_(values)
        self.tokens.copy_(numbers_now[:, len(columns) : len(columns) + path])
        self.rows.copy_(numbers_now[:, len(columns) + path :])
