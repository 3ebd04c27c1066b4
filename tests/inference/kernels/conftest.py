"""Kernels under Triton's interpreter: memory that nobody wrote is NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headsmith.inference.kernels.interpreter import exchange_once


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run on the CPU; an element of torch.empty that is read before it is written
    spoils the result.
    """
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=0: the kernels need a GPU")
    exchange_once()
    monkeypatch.setenv("HEADSMITH_KERNELS", "on")
    empty = torch.empty

    def poisoned(*shape: int, **kwargs: Any) -> Tensor:
        made = empty(*shape, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.fixture(scope="session")
def no_worse() -> Callable[..., None]:
    """no_worse(kernel, reference, exact, chance): a bfloat16 kernel is as near to the float64 truth
    as the reference in bfloat16 is, but for a factor where both round equally often.
    """

    def check(kernel: Tensor, reference: Tensor, exact: Tensor, chance: float = 1.0) -> None:
        assert kernel.dtype == reference.dtype and kernel.shape == exact.shape
        assert exact.isfinite().all()
        assert rms(kernel.double() - exact) <= chance * rms(reference.double() - exact)

    return check
