"""States as a store keeps them: float32, bfloat16, or fp8 with a scale for every token and tap.

fp8 is e4m3: three bits of mantissa, values up to 448. A scale a tensor would not do: the first
token of a text is hundreds of times louder than the rest, and deep taps than early ones. The last
state, from which the teacher's distribution is made, stays bfloat16 there; the teacher's first
choice and normaliser are always those of the state before it was rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headsmith.data.states import States

DType = Literal["float32", "bfloat16", "fp8"]
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "fp8")
# Taps and last states in each.
_STORED = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.float8_e4m3fn, torch.bfloat16),
}
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
NAMES = ("taps", "scales", "last", "choice", "logsumexp")


@dataclass(frozen=True, slots=True)
class Shape:
    """m taps of width H in one of DTYPES."""

    taps: int
    width: int
    dtype: DType

    def nbytes(self, tokens: int, read: int) -> int:
        """Bytes of a row of `tokens` tokens, of which `read` have a last state."""
        tapped, last = (kind.itemsize for kind in _STORED[self.dtype])
        scales = 4 * self.taps if self.dtype == "fp8" else 0
        each_read = self.width * last + 8
        return tokens * (self.taps * self.width * tapped + scales) + read * each_read


def encode(states: States, dtype: DType) -> dict[str, Tensor]:
    """The tensors that are stored of a row, on the CPU, by NAMES; without `scales` but for fp8."""
    tapped, last = _STORED[dtype]
    found = {
        "last": states.last.to(last),
        "choice": states.choice.to(torch.int32),
        "logsumexp": states.logsumexp.float(),
    }
    if dtype == "fp8":
        taps = states.taps.float()
        scales = (taps.abs().amax(-1) / _FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        found["scales"] = scales
        found["taps"] = (taps / scales[..., None]).clamp(-_FP8_MAX, _FP8_MAX).to(tapped)
    else:
        found["taps"] = states.taps.to(tapped)
    return {name: tensor.cpu().contiguous() for name, tensor in found.items()}


def decode(
    tensors: Mapping[str, Tensor],
    taps: list[int],
    dtype: torch.dtype,
    device: torch.device | str,
) -> States:
    """The states behind stored tensors, in the dtype of the target and on `device`; of the taps
    only those in the given places.
    """
    here = {name: tensor.to(device) for name, tensor in tensors.items() if name != "taps"}
    stored = tensors["taps"]
    if taps != list(range(stored.shape[1])):
        # Bytes, because fp8 tensors cannot be indexed everywhere.
        chosen = stored.view(torch.uint8)[:, taps].contiguous()
        stored = chosen.view(stored.dtype)
    values = stored.to(device)
    if "scales" in here:
        values = values.float() * here["scales"][:, taps, None]
    # Copies: where a tensor lies in a file decides how it is aligned, and that the last digit.
    return States(
        taps=values.to(dtype, copy=True),
        last=here["last"].to(dtype, copy=True),
        choice=here["choice"].to(torch.int64),
        logsumexp=here["logsumexp"].clone(),
    )
