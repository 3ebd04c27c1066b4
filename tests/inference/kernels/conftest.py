"""Kernels under Triton's interpreter: memory that nobody wrote is NaN, and wrong variants."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
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


@pytest.fixture
def mutant(tmp_path: Path) -> Callable[[ModuleType, str, str], ModuleType]:
    """mutant(module, old, new): the module with one piece of its source replaced."""

    def make(module: ModuleType, old: str, new: str) -> ModuleType:
        source = Path(module.__file__ or "").read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the source"
        path = tmp_path / "mutant.py"
        path.write_text(source.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("mutant", path)
        assert spec is not None and spec.loader is not None
        wrong = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(wrong)
        return wrong

    return make


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
