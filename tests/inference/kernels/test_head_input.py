"""The head's input: kernels and references against the head's own modules in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from headsmith.inference.kernels.head_input import (
    attention_input,
    fuse_rows,
    reference_fuse,
    reference_input,
)

TAPS, EPS = 3, 1e-5
ROWS = {1: [4], 5: [8, 0, 3, 3, 1], 17: [*range(9), *range(8)]}


def random(*shape: int, seed: int) -> Tensor:
    # Small enough that eps counts.
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def inputs(norm: str, width: int, out: int) -> dict[str, Tensor]:
    made = {
        "taps": random(9, TAPS, width, seed=1),
        "weight": random(out, TAPS * width, seed=2) * 40,
    }
    if norm == "each":
        made["norms"] = random(TAPS, width, seed=3) * 30 + 1
    if norm == "whole":
        made["whole_norm"] = random(TAPS * width, seed=4) * 30 + 1
    return made


def exact(made: dict[str, Tensor], rows: Tensor) -> Tensor:
    """The way Eagle3Head.read and fc do it."""
    made = {name: tensor.double() for name, tensor in made.items()}
    read = made["taps"][rows]
    width = read.shape[2]
    if "norms" in made:
        norms = [nn.RMSNorm(width, EPS, dtype=torch.float64) for _ in range(TAPS)]
        for norm, weight in zip(norms, made["norms"], strict=True):
            norm.weight.data = weight
        read = torch.stack([norm(tap) for norm, tap in zip(norms, read.unbind(1), strict=True)], 1)
    flat = read.flatten(1)
    if "whole_norm" in made:
        whole = nn.RMSNorm(TAPS * width, EPS, dtype=torch.float64)
        whole.weight.data = made["whole_norm"]
        flat = whole(flat)
    return (flat @ made["weight"].T).detach()


def run(function: Callable[..., Tensor], made: dict[str, Tensor], rows: Tensor) -> Tensor:
    return function(rows=rows, eps=EPS, **made)


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("norm", ["none", "each", "whole"])
def test_gather_norm_and_fc(norm: str, count: int, no_worse: Callable[..., None]) -> None:
    made, rows = inputs(norm, width=72, out=40), torch.tensor(ROWS[count])
    truth = exact(made, rows)
    double = {name: tensor.double() for name, tensor in made.items()}
    torch.testing.assert_close(run(reference_fuse, double, rows), truth)
    found = run(fuse_rows, made, rows)
    torch.testing.assert_close(found.double(), truth, atol=1e-5, rtol=1e-5)
    half = {name: tensor.bfloat16() for name, tensor in made.items()}
    truth = exact(half, rows)
    # Both round the normed taps once, each in its own place, and this is 40 to 680 numbers.
    chance = 1.1 if norm != "none" else 1.0
    no_worse(run(fuse_rows, half, rows), run(reference_fuse, half, rows), truth, chance)


@pytest.mark.parametrize("width", [48, 64])
def test_two_norms_side_by_side(width: int, no_worse: Callable[..., None]) -> None:
    made = [random(7, width, seed=1), random(7, width, seed=2)]
    made += [random(width, seed=3) * 30 + 1, random(width, seed=4) * 30 + 1]
    truth = reference_input(*(t.double() for t in made), EPS)
    norms = nn.RMSNorm(width, EPS), nn.RMSNorm(width, EPS)
    for norm, weight in zip(norms, made[2:], strict=True):
        norm.double().weight.data = weight.double()
    parts = [norm(t.double()) for norm, t in zip(norms, made[:2], strict=True)]
    torch.testing.assert_close(truth, torch.cat(parts, -1).detach())
    found = attention_input(*made, EPS)
    torch.testing.assert_close(found.double(), truth, atol=1e-5, rtol=1e-5)
    half = [t.bfloat16() for t in made]
    truth = reference_input(*(t.double() for t in half), EPS)
    no_worse(attention_input(*half, EPS), reference_input(*half, EPS), truth)


WRONG = {
    "the edge of a tap": ("inside = k + ahead < WIDTH", "inside = k + ahead <= WIDTH"),
    "squares of earlier taps": (
        "squares = tl.zeros([BLOCK_R], tl.float32)\n        total",
        "total",
    ),
    "norm of the first tap for all": ("norm + at,", "norm + k + ahead,"),
    "rows not gathered": ("tl.load(rows + row, mask=live, other=0)", "row"),
    "the last column of the output": ("(column < OUT)[None, :]\n", "(column < OUT - 1)[None, :]\n"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_caught(
    name: str, mutant: Callable[[ModuleType, str, str], ModuleType]
) -> None:
    from headsmith.inference.kernels import head_input_triton

    made, rows = inputs("each", width=72, out=40), torch.tensor(ROWS[5])
    wrong = mutant(head_input_triton, *WRONG[name])
    norms, whole = made["norms"], None
    found = wrong.launch_fuse(made["taps"], rows, made["weight"], norms, whole, EPS)
    assert not torch.allclose(found.double(), exact(made, rows), atol=1e-3)
