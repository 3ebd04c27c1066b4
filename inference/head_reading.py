"""What an EAGLE head reads, by its own modules or by the kernels of its input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headsmith.inference.kernels import takes
from headsmith.inference.kernels.head_input import attention_input, fuse_rows
from headsmith.inference.ranking import unpacked
from headsmith.models.eagle3 import Eagle3Head

# The rows of taps [T, m, H_t] that are read; None for all of them.
Rows = tuple[Tensor, Sequence[int] | None]


class HeadReading:
    """The two ways into a head's layer; which of them runs is settled when it is made."""

    def __init__(self, head: Eagle3Head) -> None:
        self.head, config = head, head.config
        self._eps = config.rms_norm_eps
        self._by_kernel = unpacked(head.fc) and takes(head.fc.weight)
        self._norms: Tensor | None = None
        self._whole: Tensor | None = None
        if self._by_kernel and config.fc_norm:
            self._norms = torch.stack(
                [weight for norm in head.fc_norm for weight in norm.parameters()]
            )
        if self._by_kernel and config.norm_before_fc:
            self._whole = head.input_norm.weight

    def fuse(self, read: Sequence[Rows]) -> Tensor:
        """z [n, H] of all rows, one part behind the other."""
        if not self._fuses:
            parts = [taps if rows is None else taps[rows] for taps, rows in read]
            return self.head.fuse(torch.cat(parts))
        return torch.cat(
            [self.fuse_at(t, torch.tensor(rows, device=t.device)) for t, rows in merged(read)]
        )

    def fuse_at(self, taps: Tensor, rows: Tensor) -> Tensor:
        """The same of rows int64 [n] of taps [T, m, H_t]."""
        if not self._fuses:
            return self.head.fuse(taps[rows])
        return fuse_rows(taps, rows, self.head.fc.weight, self._norms, self._whole, self._eps)

    @property
    def _fuses(self) -> bool:
        """A head with both kinds of norms is none that the kernel knows."""
        return self._by_kernel and (self._norms is None or self._whole is None)

    def inputs(self, embeds: Tensor, z: Tensor) -> Tensor:
        """The attention input u [n, 2H] of embeddings and states [n, H]."""
        layer = self.head.midlayer
        if not self._by_kernel:
            return layer.inputs(embeds, z)
        norms = layer.input_layernorm.weight, layer.hidden_norm.weight
        return attention_input(embeds, z, *norms, self._eps)


def merged(read: Sequence[Rows]) -> list[tuple[Tensor, list[int]]]:
    """Neighbours that read the same taps as one: requests of one pass share a launch."""
    found: list[tuple[Tensor, list[int]]] = []
    for taps, rows in read:
        numbers = range(len(taps)) if rows is None else rows
        if found and found[-1][0] is taps:
            found[-1][1].extend(numbers)
        else:
            found.append((taps, list(numbers)))
    return found
