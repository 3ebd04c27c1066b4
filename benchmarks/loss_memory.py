"""Memory of the loss at draft vocabularies of several sizes: `python benchmarks/loss_memory.py`.

Forward and backward of lm_head and distillation loss over the rows of one packed row, each size in
a process of its own. Told is how far the process grew at its peak, without the gradients that are
left at the end (of the weight and of the states), which no way of computing can avoid. Dense is the
plain computation: all logits at once, by autograd.
"""

import json
import resource
import subprocess
import sys
import time

import click

SIZES = (8192, 32768, 131072)


@click.command()
@click.option("--rows", default=768, show_default=True, help="Loss rows of each step.")
@click.option("--steps", default=3, show_default=True, help="Unroll steps.")
@click.option("--width", default=576, show_default=True, help="Width of head and target.")
@click.option("--dense/--no-dense", default=True, help="Also the plain computation.")
@click.option("--one", hidden=True, help="SIZE,WAY: measure here and print JSON.")
def main(rows: int, steps: int, width: int, dense: bool, one: str | None) -> None:
    """Print a table."""
    if one is not None:
        size, way = one.split(",")
        print(json.dumps(measure(int(size), way, rows, steps, width)))
        return
    shape = [f"--rows={rows}", f"--steps={steps}", f"--width={width}"]
    print(f"{rows} rows of each of {steps} steps, width {width}, float32")
    print("| draft ids | way | MiB beyond the gradients | seconds |\n|---|---|---|---|")
    for size in SIZES:
        for way in ("chunks", "dense") if dense else ("chunks",):
            command = [sys.executable, __file__, *shape, f"--one={size},{way}"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            told = json.loads(done.stdout)
            print(f"| {size} | {way} | {told['bytes'] / 2**20:.0f} | {told['seconds']:.2f} |")


def measure(size: int, way: str, rows: int, steps: int, width: int) -> dict[str, float]:
    """Peak growth in bytes without the gradients, and seconds."""
    import torch

    from headsmith.train.kernels.distil import Teacher

    g = torch.Generator().manual_seed(0)
    vocab = size + size // 8
    ids = torch.randperm(vocab, generator=g)[:size].sort().values
    slots = [torch.arange(rows) + k for k in range(steps)]
    last = torch.randn(rows + steps, width, generator=g)
    matrix = torch.randn(vocab, width, generator=g) / width**0.5
    states = [torch.randn(rows, width, generator=g).requires_grad_() for _ in range(steps)]
    weight = (torch.randn(size, width, generator=g) / width**0.5).requires_grad_()
    covered = torch.ones(rows + steps, dtype=torch.bool)
    teacher = Teacher(last, matrix, ids, lambda x, _: x, torch.full((rows + steps,), 9.0), covered)
    # What is loaded with the first product is no part of the loss.
    step(way, [s[:8] for s in states], weight[:64], teacher, [i[:8] for i in slots])
    before, begin = peak(), time.perf_counter()
    step(way, states, weight, teacher, slots)
    seconds = time.perf_counter() - begin
    left = sum(t.grad.nbytes for t in (weight, *states) if t.grad is not None)
    return {"bytes": peak() - before - left, "seconds": seconds}


def step(way: str, states: list, weight: object, teacher: object, slots: list) -> None:
    """Forward and backward, gradients into the leaves."""
    import torch

    from headsmith.train.kernels.distil import Teacher, distil
    from headsmith.train.loss import LossSettings, step_loss

    assert isinstance(teacher, Teacher) and isinstance(weight, torch.Tensor)
    loss = LossSettings("kl")
    if way == "chunks":
        sums, _ = distil(states, weight, teacher, slots, loss)
    else:
        said = teacher.last @ teacher.weight[teacher.ids[: len(weight)]].T
        lse, covered = teacher.logsumexp, teacher.covered
        pairs = zip(states, slots, strict=True)
        parts = [step_loss(loss, s @ weight.T, said[i], lse[i], covered[i]) for s, i in pairs]
        sums = torch.stack(parts)
    sums.sum().backward()


def peak() -> int:
    """Most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
