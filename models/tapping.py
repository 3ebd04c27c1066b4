"""Reading the residual stream of a decoder between its blocks while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from headsmith.errors import HeadsmithError


@contextmanager
def tapping(blocks: Any, taps: Sequence[int], path: str) -> Iterator[dict[int, Tensor]]:
    """Within this block the passes of the decoder leave their residual stream [T, H] before block
    i, or behind the last one. HeadsmithError for a tap that the target at `path` does not have.
    """
    seen: dict[int, Tensor] = {}
    last = len(blocks)

    def before(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[index] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen[last] = (output[0] if isinstance(output, tuple) else output)[0]

    outside = [tap for tap in taps if not 0 <= tap <= last]
    if outside:
        raise HeadsmithError(f"tap {outside[0]} is outside 0..{last} of the target {path}")
    handles = []
    for tap in taps:
        if tap == last:
            handles.append(blocks[-1].register_forward_hook(after))
        else:
            handles.append(blocks[tap].register_forward_pre_hook(before(tap), with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
