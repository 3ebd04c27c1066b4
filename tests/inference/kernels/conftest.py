"""Kernels under Triton's interpreter: memory that nobody wrote is NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from headsmith.inference.kernels.interpreter import exchange_once

aten = torch.ops.aten
# What a stream that is being captured cannot do: wait for a number, or copy one from the host.
FORBIDDEN = {
    aten.item.default: "a number is read by the host",
    aten._local_scalar_dense.default: "a number is read by the host",
    aten.nonzero.default: "a size depends on numbers",
    aten.lift_fresh.default: "a table comes from the host",
}


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


class Tape(TorchDispatchMode):
    """Stands in for a CUDA graph: every operation and every kernel with the memory that it had,
    in order, and nothing of the Python that called them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in FORBIDDEN:
            raise RuntimeError(FORBIDDEN[func])
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        places = [x for x in tree_flatten(made)[0] if isinstance(x, torch.Tensor)]

        def again() -> None:
            found = [x for x in tree_flatten(func(*args, **kwargs))[0] if torch.is_tensor(x)]
            for place, new in zip(places, found, strict=True):
                if place.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    place.copy_(new)

        self.entries.append(again)
        return made

    def replay(self) -> None:
        for again in self.entries:
            again()


@contextmanager
def kernels_on(tape: Tape) -> Iterator[None]:
    """Launches of kernels go onto the tape as one entry each."""
    from triton.runtime.interpreter import InterpretedFunction

    launch = InterpretedFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        def again() -> None:
            launch(self, *args, **kwargs)

        with _disable_current_modes():
            again()
        tape.entries.append(again)

    def refuse(*args: Any) -> None:
        raise RuntimeError("numbers are read by the host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", recorded)
        patch.setattr(torch.Tensor, "tolist", refuse)
        yield


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """Rounds are recorded and replayed; the tapes."""
    tapes: list[Tape] = []

    def graph_of(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
        run()
        tape = Tape()
        with kernels_on(tape), tape:
            run()
        tapes.append(tape)
        return tape.replay

    monkeypatch.setattr("headsmith.inference.resident.replay.graph_of", graph_of)
    return tapes
