"""The head's gradients and moments in shares (ZeRO-2), and its weights too (ZeRO-3), by DeepSpeed.

DeepSpeed owns backward, clipping and the step. Its AdamW is ours, whose groups keep their rates and
decays but hold one flat share each; the moments of a weight are cut out of those.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headsmith.train.parallel import MOMENTS, check_norm, check_single


class Zero:
    """A head in shares of `stage` 2 or 3; see `Parallel`."""

    runs_head = False

    def __init__(
        self,
        stage: int,
        device: torch.device,
        unroll: nn.Module,
        optimisers: list[Optimizer],
        clip: float,
    ) -> None:
        adam = check_single(optimisers, f"ZeRO-{stage}")
        if device.type == "cpu":
            # Otherwise it would take the GPU of a machine that has one.
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # It tells every process's every choice; what matters comes as an exception.
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # On a CPU it would compile an exchange of its own on the spot; torch's does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.stage, self.adam = stage, adam
        self.optimisers = optimisers
        self.groups = [list(group["params"]) for group in adam.param_groups]
        self.keys = [set(group) - {"params"} for group in adam.param_groups]
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        self.model, _, _, _ = deepspeed.initialize(
            model=unroll, optimizer=adam, config=_configuration(stage, clip)
        )
        if stage == 3:
            self._keep_whole_in_steps(unroll)
        self._make_moments()

    @property
    def weights(self) -> list[nn.Parameter]:
        """The trained weights in the order of a state dict."""
        return [weight for group in self.groups for weight in group]

    def turn(self, last: bool) -> AbstractContextManager[Any]:
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        self.model.backward(loss)

    def update(self, clip: float) -> float:
        # Clips by what it was made with; where the norm is not finite it moves nothing.
        self.model.step()
        norm = float(self.model.get_global_grad_norm())
        check_norm(norm)
        return norm

    @contextmanager
    def whole(self) -> Iterator[None]:
        if self.stage == 2:
            yield
            return
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(self.model.module.parameters())):
            yield

    def states(self) -> list[dict[str, Any]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        step = next(iter(self.adam.state.values()))["step"]
        state: dict[int, dict[str, Tensor]] = {}
        for index, weight in enumerate(self.weights):
            moments = {key: safe_get_full_optimizer_state(weight, key).cpu() for key in MOMENTS}
            state[index] = {"step": step.detach().cpu().clone(), **moments}
        groups, start = [], 0
        for keys, weights, group in zip(
            self.keys, self.groups, self.adam.param_groups, strict=True
        ):
            indices = list(range(start, start + len(weights)))
            groups.append({key: group[key] for key in group if key in keys} | {"params": indices})
            start += len(weights)
        return [{"state": state, "param_groups": groups}]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        (saved,) = states
        for group, known in zip(self.adam.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in known.items() if key != "params"})
        for index, weight in enumerate(self.weights):
            for key in MOMENTS:
                self._set_moment(weight, key, saved["state"][index][key])
        for state in self.adam.state.values():
            state["step"].fill_(float(saved["state"][0]["step"]))

    def _keep_whole_in_steps(self, unroll: nn.Module) -> None:
        """Gather all weights when a step's first row begins and free them with the step: the head
        calls each of its layers several times a row, and DeepSpeed would free a weight after one
        call and miss it in the backward of another.
        """
        from deepspeed.runtime.zero import register_external_parameter

        weights: list[Any] = list(unroll.parameters())
        for weight in weights:
            register_external_parameter(unroll, weight)
            weight.is_external_param = True

    def _make_moments(self) -> None:
        """Zero moments for the flat shares, as AdamW's first step would make them: DeepSpeed knows
        those of a weight only once they are there.
        """
        zero = self.model.optimizer
        if self.stage == 3:
            flat = zero.fp32_partitioned_groups_flat
        else:
            flat = zero.single_partition_of_fp32_groups
        for share in flat:
            moments = {key: torch.zeros_like(share, requires_grad=False) for key in MOMENTS}
            self.adam.state[share] = {"step": torch.tensor(0.0), **moments}
        if self.stage == 2:
            from deepspeed.utils import lazy_init_hp_params_optimizer_state as link

            for weights, share in zip(zero.bit16_groups, flat, strict=True):
                link(weights, share, self.adam.state)

    def _set_moment(self, weight: Any, key: str, moment: Tensor) -> None:
        """Keep this process's share of a whole moment."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        moment = moment.to(next(iter(self.adam.state)).device)
        if self.stage == 2:
            safe_set_full_optimizer_state(weight, moment, key)
            return
        # DeepSpeed's own cut fails where the shares do not come out even: the last one is padded.
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        size = weight.ds_tensor.numel()
        padded = nn.functional.pad(moment.flatten(), (0, size * world - moment.numel()))
        safe_set_local_optimizer_state(weight, padded[size * rank : size * (rank + 1)], key)


def _configuration(stage: int, clip: float) -> dict[str, Any]:
    return {
        # One packed row at a time; when a step ends is ours to say (`turn`).
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
