"""Kernels of the trainer under Triton's interpreter, and wrong variants of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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
