"""The tensors of an export as an engine takes them: each by name, of the shape it expects."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError


class Stored:
    """A folder that was exported and the `_tensors` in it that nobody has taken yet."""

    folder: Path
    _tensors: dict[str, Tensor]

    def _take(self, name: str, shape: list[int]) -> Tensor:
        """The tensor of that name and shape, ids as they are and all else in float32."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            self._fault(f"lacks {name}")
        if list(tensor.shape) != shape:
            self._fault(f"has {name} of {list(tensor.shape)} where {shape} is read")
        return tensor if tensor.dtype == torch.int64 else tensor.float()

    def _fault(self, what: str) -> NoReturn:
        raise HeadsmithError(f"the export {self.folder} {what}")
