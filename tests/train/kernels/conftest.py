"""Kernels of the trainer under Triton's interpreter."""

from __future__ import annotations

import pytest

from headsmith.inference.kernels.interpreter import exchange_once


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU go through the kernels."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=0: the kernels need a GPU")
    exchange_once()
    monkeypatch.setenv("HEADSMITH_KERNELS", "on")
