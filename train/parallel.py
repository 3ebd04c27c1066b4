"""How the head in training lies over the processes: whole in each, or in shares (FSDP2, ZeRO).

Whatever the way, every optimiser step is the one that a single process would make, and a checkpoint
is the one that a single process would write; so a run may go on with another way and with another
number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from headsmith.errors import HeadsmithError
from headsmith.train.launch import Way

# What AdamW's state dict holds of every weight, beside its step count.
MOMENTS = ("exp_avg", "exp_avg_sq")


class Parallel(Protocol):
    """A head in training, in one of the ways.

    model: called for every packed row. optimisers: their groups' rates may be set; `update` steps
    them. runs_head: whether the head can decode as it lies. All methods are called by all processes
    together.
    """

    runs_head: bool
    model: nn.Module
    optimisers: list[Optimizer]

    def turn(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one packed row; `last`: the step's last one here."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add to the gradients, which become the mean over the processes."""

    def update(self, clip: float) -> float:
        """Clip the gradients, move the weights, forget the gradients; the norm before clipping.
        FloatingPointError when that is not finite.
        """

    def whole(self) -> AbstractContextManager[None]:
        """Within it the head's weights are whole tensors in every process, to be saved."""

    def states(self) -> list[dict[str, Any]]:
        """State dicts of the optimisers as a single process has them, on the CPU."""

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Take up what `states` gave."""


def make_parallel(
    way: Way, accelerator: Accelerator, unroll: nn.Module, optimisers: list[Optimizer], clip: float
) -> Parallel:
    """`unroll` holds the whole head, the same in all processes, and `optimisers` its weights.
    HeadsmithError for optimisers that the way cannot share out.
    """
    if way == "replicated":
        return Replicated(accelerator, *accelerator.prepare(unroll, *optimisers))
    if way == "fsdp2":
        from headsmith.train.parallel_fsdp import Fsdp

        return Fsdp(accelerator.device, unroll, optimisers)
    from headsmith.train.parallel_zero import Zero

    return Zero(3 if way == "zero3" else 2, accelerator.device, unroll, optimisers, clip)


class Replicated:
    """Every process holds all of the head; one process, or DDP."""

    runs_head = True

    def __init__(self, accelerator: Accelerator, model: nn.Module, *optimisers: Optimizer) -> None:
        self.accelerator, self.model, self.optimisers = accelerator, model, list(optimisers)

    def turn(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.accelerator.backward(loss)

    def update(self, clip: float) -> float:
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), clip))
        return step_all(self.optimisers, norm)

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def states(self) -> list[dict[str, Any]]:
        return [optimiser.state_dict() for optimiser in self.optimisers]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        for optimiser, state in zip(self.optimisers, states, strict=True):
            optimiser.load_state_dict(state)


def step_all(optimisers: Sequence[Optimizer], norm: float) -> float:
    """Move the weights and forget the gradients, whose `norm` comes back; FloatingPointError before
    anything is moved when it is not finite.
    """
    check_norm(norm)
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return norm


def check_norm(norm: float) -> None:
    """FloatingPointError when a gradient's norm is not finite."""
    if not math.isfinite(norm):
        raise FloatingPointError(norm)


def changed(state: dict[str, Any], change: Callable[[Tensor, int], Tensor]) -> dict[str, Any]:
    """An optimiser's state dict, its moments replaced by `change(moment, index of the weight)`."""
    moments = {
        index: {
            key: change(value, index) if key in MOMENTS else value for key, value in known.items()
        }
        for index, known in state["state"].items()
    }
    return {"state": moments, "param_groups": state["param_groups"]}


def check_single(optimisers: Sequence[Optimizer], way: str) -> torch.optim.AdamW:
    """The one AdamW that a way can share out; HeadsmithError for anything else."""
    if len(optimisers) != 1 or not isinstance(optimisers[0], torch.optim.AdamW):
        raise HeadsmithError(
            f"{way} shares out one AdamW, and this run has other optimisers; launch with "
            "recipes/accelerate/gpu-8.yaml, where every process holds the whole head"
        )
    return optimisers[0]
