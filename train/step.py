"""One optimiser step: the target's states of some packed rows, the unroll, the loss, the update.

The loss is  sum_k decay^k * (sum of loss_k over all rows of the step) / N_k,  where N_k counts the
rows whose loss counts at unroll step k over all packed rows, micro-steps and ranks. It is known
from the masks before any forward, so packing, accumulation and world size change only rounding.

Legend: K unroll steps of this optimiser step.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from headsmith.errors import HeadsmithError
from headsmith.models.heads import Head
from headsmith.models.target import Target
from headsmith.train.batches import Batches, share
from headsmith.train.features import Features
from headsmith.train.kinds import KINDS
from headsmith.train.loss import LossSettings
from headsmith.train.optimiser import rate_factor, set_rates
from headsmith.train.parallel import Parallel, Replicated
from headsmith.train.predict import walk
from headsmith.train.recipe import TrainSection
from headsmith.train.stages import stage
from headsmith.train.unroll import TrainRow

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def steps_at(step: int, total: int, settings: TrainSection) -> int:
    """How many steps the unroll has at a 0-based optimiser step; see `TrainSection`."""
    stages = settings.unroll_steps - 1
    if stages == 0 or settings.unroll_growth == 0:
        return settings.unroll_steps
    return min(1 + int(step / total * stages / settings.unroll_growth), settings.unroll_steps)


class Unroll(nn.Module):
    """The head's training forward as one module, so that accelerate can wrap it."""

    def __init__(
        self,
        head: Head,
        target: Target,
        settings: TrainSection,
        loss: LossSettings | None = None,
    ) -> None:
        super().__init__()
        self.head, self.target = head, target
        self.loss = loss or LossSettings(settings.loss, settings.kl_scale, settings.kl_decay)
        self.autocasts = settings.precision == "bfloat16"
        # Copying rows of a matrix is nothing to a GPU, whose memory is what is short.
        self.kept: dict[torch.dtype, Tensor] | None = {} if target.device.type == "cpu" else None

    def forward(
        self, row: TrainRow, steps: int, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss sums with gradient [K]; counts [3, K]: right, right at all steps so far, covered;
        and [2]: tokens and passes of decoding the answers with these drafts. `weights` [K]: what
        the loss sums will be weighed with, up to a factor.
        """
        device = self.target.device.type
        kind = KINDS[self.head.kind]
        known = {"weights": weights, "kept": self.kept} if kind.unrolls else {}
        precision = torch.autocast(device, torch.bfloat16) if self.autocasts else nullcontext()
        with precision, stage("loss"):
            result = kind.losses(self.head, self.target, row, steps, self.loss, **known)
        counts = torch.stack([result.correct, result.joint_correct, result.covered])
        return result.loss_sums, counts, torch.tensor(walk(row.rows[0], result.run))


@dataclass(slots=True)
class Stepper:
    """Runs optimiser steps over the batches of `features`; `model` is the (wrapped) Unroll of its
    head. `parallel` says how they lie over the processes (None: all of it in each).
    """

    accelerator: Accelerator
    features: Features
    model: nn.Module
    optimisers: list[Optimizer]
    settings: TrainSection
    parallel: Parallel | None = None

    @property
    def way(self) -> Parallel:
        if self.parallel is None:
            self.parallel = Replicated(self.accelerator, self.model, *self.optimisers)
        return self.parallel

    @property
    def target(self) -> Target:
        return self.features.target

    @property
    def head(self) -> Head:
        return self.features.head

    @property
    def batches(self) -> Batches:
        return self.features.batches

    def run(self, step: int, stop: int = 0) -> tuple[dict[str, Any], int]:
        """Train the 0-based optimiser step `step`; return its record for the log and a signal.

        `stop` is the signal that this rank received, 0 for none. All ranks return the same one.
        """
        started = time.monotonic()
        settings = self.settings
        factor = rate_factor(step, self.batches.total_steps, settings.warmup_ratio)
        rate = set_rates(self.optimisers, settings, factor)
        rows = self.batches.step_rows(step)
        sums, walked = self._backward(rows, self._steps(step))
        try:
            with stage("optimiser"):
                norm = self.way.update(settings.clip)
        except FloatingPointError as error:
            raise HeadsmithError(
                f"the gradient of step {step + 1} is {error}; lower train.learning_rate "
                "and continue from the last checkpoint with --resume"
            ) from error
        stops = sums.new_tensor([stop == number for number in SIGNALS])
        # One exchange for all: ranks must agree on when to stop.
        everyone = self.accelerator.reduce(torch.cat([sums.flatten(), walked, stops]), "sum")
        agreed = [n for n, count in zip(SIGNALS, everyone[-2:].tolist(), strict=True) if count]
        record = self._record(step, rows, everyone[:-4].view_as(sums), everyone[-4:-2].tolist())
        record |= {"learning_rate": rate, "gradient_norm": norm}
        record["seconds"] = round(time.monotonic() - started, 3)
        return record, max(agreed, default=0)

    def _steps(self, step: int) -> int:
        """How many steps ahead are trained at a 0-based optimiser step."""
        if KINDS[self.head.kind].unrolls:
            return steps_at(step, self.batches.total_steps, self.settings)
        return self.batches.num_steps

    def _backward(self, rows: Sequence[int], steps: int) -> tuple[Tensor, Tensor]:
        """Accumulate this rank's gradients; return its float64 sums [4, K] (loss, three counts) and
        [2] (tokens and passes of decoding the answers).
        """
        accelerator, world = self.accelerator, self.accelerator.num_processes
        weights = self._decay(steps) / self.batches.counts[rows, :steps].sum(0).clamp_min(1)
        # Gradients are averaged over ranks, the loss is not: hence the factor.
        scale = (weights * world).to(self.target.device)
        sums = torch.zeros(4, steps, dtype=torch.float64)
        decoded = torch.zeros(2, dtype=torch.float64)
        mine = share(rows, accelerator.process_index, world, self.batches.tokens)
        for turn, (row, weight) in enumerate(mine, start=1):
            last = turn == len(mine)
            with self.way.turn(last):
                with stage("data"):
                    prepared = self.features.row(row)
                    self.target.settle()
                losses, counts, walked = self.model(prepared, steps, scale)
                self._refuse_bad_loss(losses, row)
                with stage("loss backward"):
                    self.way.backward((scale.to(losses.dtype) * losses).sum() * weight, last)
            sums += weight * torch.cat([losses.detach()[None].double(), counts.double()]).cpu()
            decoded += weight * walked.double()
        return sums.to(accelerator.device), decoded.to(accelerator.device)

    def _refuse_bad_loss(self, losses: Tensor, index: int) -> None:
        if not torch.isfinite(losses).all():
            raise HeadsmithError(
                f"the loss of {self.batches.name(index)} is not finite; lower "
                "train.learning_rate and continue from the last checkpoint with --resume"
            )

    def _decay(self, steps: int) -> Tensor:
        """decay^k, float64 [K]."""
        return self.settings.step_decay ** torch.arange(steps, dtype=torch.float64)

    def _record(
        self, step: int, rows: Sequence[int], sums: Tensor, walked: Sequence[float]
    ) -> dict[str, Any]:
        """The line of metrics.jsonl: the loss that was trained, and rates over all loss rows.

        accuracy[k]: right at step k. joint[k]: right at all steps up to k. predicted_tau: tau of
        decoding these answers with chains of K drafts (`headsmith.train.predict`).
        """
        counted = self.batches.counts[rows, : sums.shape[1]].sum(0)
        loss, correct, joint, covered = sums.cpu() / counted.clamp_min(1)
        epoch, _ = self.batches.position(step)
        return {
            "step": step + 1,
            "epoch": epoch + 1,
            "loss": float((self._decay(len(loss)) * loss).sum()),
            "losses": loss.tolist(),
            "accuracy": correct.tolist(),
            "joint": joint.tolist(),
            "covered": covered.tolist(),
            "predicted_tau": walked[0] / max(walked[1], 1),
            "rows": counted.tolist(),
            "tokens": sum(self.batches.tokens[row] for row in rows),
        }
