"""headsmith's training step as a worker of compare.py: the trainer's own `Stepper` on states that
lie in memory.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from step_case import Case, llama
from step_worker import Answers, serve
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from headsmith.data.pack import Row
from headsmith.data.states import States, read_tokens
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.products import VARIABLE, library
from headsmith.models.target import Target
from headsmith.train.batches import Batches
from headsmith.train.features import Features
from headsmith.train.optimiser import build_optimisers
from headsmith.train.recipe import TrainSection
from headsmith.train.settle import settle
from headsmith.train.stages import profiling, whole_step
from headsmith.train.step import Stepper, Unroll
from headsmith.train.unroll import loss_rows

TAPS = (2, 15, 27)


class Documents:
    """What `make_row` reads of a prepared dataset."""

    def __init__(self, row: Row) -> None:
        self.ids, self.masks = row.ids.split(row.lengths), row.mask.split(row.lengths)

    def __getitem__(self, indices: list[int]) -> dict[str, list[Tensor]]:
        return {
            "input_ids": [self.ids[i] for i in indices],
            "loss_mask": [self.masks[i] for i in indices],
        }


class Given:
    """The states of the one packed row."""

    def __init__(self, states: States) -> None:
        self._states = states

    def states(self, index: int) -> States:
        return self._states


def make_target(case: Case, embedding: Tensor) -> Target:
    """A target without its blocks."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama(case, tie_word_embeddings=True))
    model.model.layers = torch.nn.ModuleList()
    model.to_empty(device="cpu")
    model.get_input_embeddings().weight = torch.nn.Parameter(embedding)
    model.tie_weights()
    return Target(model, None, whole=False)  # type: ignore[arg-type]


def make_stepper(data: dict[str, Any], precision: str) -> Stepper:
    """The trainer's step on the data of a case."""
    case = Case(**data["case"])
    torch.manual_seed(0)
    row = Row(data["ids"], data["mask"], data["lengths"])
    target = make_target(case, data["embedding"])
    read = read_tokens(row)
    told = (data[name][read] for name in ("last", "choice", "logsumexp"))
    states = States(data["taps"], *told)
    head = Eagle3Head.for_target(target, data["draft_ids"], taps=TAPS)
    head.lm_head.weight.requires_grad_(case.lm_head)
    settings = TrainSection(unroll_steps=case.steps, precision=precision, epochs=10**6)
    counts = torch.tensor([[len(rows) for rows in loss_rows(row, case.steps)]])
    batches = Batches(
        dataset=Documents(row),
        documents=[list(range(case.documents))],
        tokens=[case.tokens],
        counts=counts,
        tokens_per_step=case.tokens,
        seed=0,
        epochs=settings.epochs,
        max_steps=None,
    )
    features = Features(target, head, batches, True, Given(states))
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    model, *optimisers = accelerator.prepare(
        Unroll(head, target, settings), *build_optimisers(head, settings)
    )
    return Stepper(accelerator, features, model, optimisers, settings)


class Products(TorchDispatchMode):
    """Counts the matrix products that run within: (batch, rows, inner, columns)."""

    NAMES = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, int, int, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            a, b = (x.shape for x in args[-2:])
            # A product with a single row or column is a sum, which no one would call matmul for.
            if min(a[-2], b[-1]) > 1:
                self.found[(a[0] if len(a) == 3 else 1, a[-2], a[-1], b[-1])] += 1
        return func(*args, **(kwargs or {}))


def build(settings: dict[str, Any]) -> Answers:
    """The answers of this program."""
    torch.set_num_threads(settings["threads"])
    data = torch.load(settings["data"], weights_only=True)
    stepper = make_stepper(data, settings["precision"])
    settle()
    made, products = 0, Products()

    def step() -> dict[str, Any]:
        nonlocal made
        made += 1
        return {"loss": stepper.run(made - 1)[0]["loss"]}

    def floor() -> dict[str, Any]:
        """The step's matrix products and nothing else, by torch.matmul."""
        if not products.found:
            # As torch's, so that they can be counted.
            with products, patch.dict(os.environ, {VARIABLE: "torch"}):
                step()
        dtype = getattr(torch, settings["precision"])
        spent = operations = 0.0
        for (batch, rows, inner, columns), count in products.found.items():
            a, b = torch.randn(batch, rows, inner), torch.randn(batch, inner, columns)
            a, b = (x.squeeze(0).to(dtype) if batch == 1 else x.to(dtype) for x in (a, b))
            torch.matmul(a, b)
            begin = time.process_time()
            for _ in range(count):
                torch.matmul(a, b)
            spent += time.process_time() - begin
            operations += 2.0 * batch * rows * inner * columns * count
        return {"products": sum(products.found.values()), "floor": spent, "flop": operations}

    def stages() -> dict[str, Any]:
        with profiling() as found:
            for _ in range(5):
                with whole_step():
                    step()
        return {"table": found.table()}

    def about() -> str:
        return f"{settings['precision']}, products by {library()}, AdamW fused"

    return {"settings": about, "step": step, "floor": floor, "stages": stages}


if __name__ == "__main__":
    serve({"version": "working tree"}, build)
