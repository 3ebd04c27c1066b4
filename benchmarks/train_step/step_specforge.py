"""The training step of the SpecForge package as a worker of compare.py: its draft model, its
strategy, its frozen target head and its optimiser through their public classes, in an environment
of their own. Its loss is a Triton kernel for GPUs; on a CPU the plain torch function beside that
kernel, which the package compiles, takes its place.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from typing import Any

# The package compiles small functions; a pool of processes for that is no part of a step.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import specforge.algorithms.eagle3.model as eagle3
import torch
from specforge.core import loss as losses
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from step_case import Case, llama
from step_worker import Answers, serve


class TorchLoss:
    """Stands where the package looks for its kernel."""

    apply = staticmethod(losses._compute_loss)


def make_strategy(data: dict[str, Any], dtype: torch.dtype) -> Eagle3TrainStrategy:
    """The package's step on the case: a head, and the target's output matrix as its teacher."""
    case, ids = data["case"], data["draft_ids"]
    config = llama(Case(**case), draft_vocab_size=case["draft_vocab"], pad_token_id=0)
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(data["embedding"])
        draft.lm_head.weight.copy_(data["embedding"][ids])
        draft.t2d.zero_()[ids] = True
        draft.d2t.copy_(ids - torch.arange(len(ids)))
    draft = draft.to(dtype)
    draft.freeze_embedding()
    draft.lm_head.weight.requires_grad_(case["lm_head"])
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        teacher = TargetHead(folder)
    with torch.no_grad():
        teacher.fc.weight.copy_(data["embedding"])
    teacher.freeze_weights()
    model = eagle3.OnlineEagle3Model(draft, length=case["steps"], attention_backend="sdpa")
    return Eagle3TrainStrategy(model, target_head=teacher.to(dtype))


def make_batch(data: dict[str, Any], dtype: torch.dtype) -> TrainBatch:
    """The documents of the row, a line each: they are of one length, and nothing is padded."""
    length = data["case"]["length"]
    rows = {name: data[name].unflatten(0, (-1, length)) for name in ("ids", "mask", "taps", "last")}
    tensors = {
        "input_ids": rows["ids"],
        "attention_mask": torch.ones_like(rows["ids"]),
        "loss_mask": rows["mask"].long(),
        "hidden_state": rows["taps"].flatten(2).to(dtype),
        "target": rows["last"].to(dtype),
    }
    names = [str(i) for i in range(len(rows["ids"]))]
    return TrainBatch(names, "eagle3", tensors, {"target_repr": "hidden_state"})


def build(settings: dict[str, Any]) -> Answers:
    """The answers of this program."""
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    eagle3.LogSoftmaxLoss = TorchLoss
    data = torch.load(settings["data"], weights_only=True)
    dtype = getattr(torch, settings["precision"])
    strategy = make_strategy(data, dtype)
    batch = make_batch(data, dtype)
    optimiser = BF16Optimizer(strategy.trainable_module(), lr=1e-4)

    def step() -> dict[str, Any]:
        loss = strategy.forward_loss(batch).loss
        loss.backward()
        optimiser.step()
        return {"loss": float(loss.detach())}

    def about() -> str:
        return f"{settings['precision']}, sdpa, torch loss, its AdamW"

    return {"settings": about, "step": step}


if __name__ == "__main__":
    serve({"version": importlib.metadata.version("specforge")}, build)
