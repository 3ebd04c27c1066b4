"""The head's weights, gradients and moments in shares, by torch's fully_shard (FSDP2).

The whole head is one unit: gathered when a row's forward begins, its gradients summed and shared
out when the last row's backward ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from headsmith.train.parallel import changed, check_single, step_all


class Fsdp:
    """A head in equal shares, one a process; see `Parallel`."""

    runs_head = False

    def __init__(
        self, device: torch.device, unroll: nn.Module, optimisers: list[Optimizer]
    ) -> None:
        check_single(optimisers, "FSDP2")
        world = torch.distributed.get_world_size()
        frozen = {p for p in unroll.parameters() if not p.requires_grad}
        names = {p: name for name, p in unroll.named_parameters()}
        mesh = init_device_mesh(device.type, (world,))
        self.model = unroll
        self.unit: Any = fully_shard(unroll, mesh=mesh, ignored_params=frozen)
        shares = dict(self.model.named_parameters())
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["params"] = [shares[names[weight]] for weight in group["params"]]
        self.optimisers = optimisers

    def turn(self, last: bool) -> AbstractContextManager[Any]:
        self.unit.set_requires_gradient_sync(last)
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def update(self, clip: float) -> float:
        grads: list[Any] = [p.grad for p in self.model.parameters() if p.grad is not None]
        shares = [grad.to_local() for grad in grads]
        # One exchange for the norm of all weights, where torch's own makes one for each.
        square = nn.utils.get_total_norm(shares).square()
        torch.distributed.all_reduce(square)
        norm = square.sqrt()
        factor = (clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(shares, factor)
        return step_all(self.optimisers, float(norm))

    @contextmanager
    def whole(self) -> Iterator[None]:
        shares: list[tuple[nn.Module, str, Any]] = [
            (module, name, weight)
            for module in self.model.modules()
            for name, weight in module._parameters.items()
            if isinstance(weight, DTensor)
        ]
        for module, name, weight in shares:
            module._parameters[name] = nn.Parameter(_whole(weight.detach()), requires_grad=False)
        try:
            yield
        finally:
            for module, name, weight in shares:
                module._parameters[name] = weight

    def states(self) -> list[dict[str, Any]]:
        return [
            changed(optimiser.state_dict(), lambda moment, _: _whole(moment).cpu())
            for optimiser in self.optimisers
        ]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        for optimiser, state in zip(self.optimisers, states, strict=True):
            weights = [weight for group in optimiser.param_groups for weight in group["params"]]

            def share(moment: Tensor, index: int, weights: list[Any] = weights) -> Tensor:
                like = weights[index]
                mesh = like.device_mesh
                # Every process has read the same file, so nothing need be sent.
                return distribute_tensor(
                    moment.to(like.device), mesh, like.placements, src_data_rank=None
                )

            optimiser.load_state_dict(changed(state, share))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
