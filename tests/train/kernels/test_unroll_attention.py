"""Unroll attention against a plain softmax over exactly the keys that a row sees, gradients too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headsmith.inference.kernels import VARIABLE
from headsmith.train.kernels import unroll_attention as module
from headsmith.train.kernels import unroll_attention_cpu as cpu
from headsmith.train.kernels.unroll_attention import unroll_attention

LENGTHS = [7, 1, 30, 12]
ROWS = [0, 3, 6, 8, 9, 12, 20, 33, 37, 40, 49]


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU's, and the plain one."""
    if request.param == "reference":
        monkeypatch.setattr(module, "on_cpu", lambda query: False)
    return request.param


def inputs(
    later: int, group: int = 2, dtype: torch.dtype = torch.float64, size: int = 6
) -> list[Tensor]:
    g = torch.Generator().manual_seed(later)
    shapes = [(2 * group, len(ROWS), size), (2, 50, size), (2, 50, size)]
    shapes += [(2, len(ROWS), size)] * (2 * later)
    return [
        torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes
    ]


def attend(given: list[Tensor], window: int | None, rows: list[int] = ROWS) -> Tensor:
    query, keys, values, *own = given
    pairs = list(zip(own[::2], own[1::2], strict=True))
    return unroll_attention(query, keys, values, pairs, torch.tensor(rows), LENGTHS, window)


def one_by_one(given: list[Tensor], window: int | None) -> Tensor:
    """Each row and head by itself."""
    query, keys, values, *own = given
    group, later = len(query) // len(keys), len(own) // 2
    heads = []
    for h in range(len(query)):
        outs = []
        for i, row in enumerate(ROWS):
            start = max(s for s in (0, 7, 8, 38) if s <= row)
            seen = [c for c in range(start, row + 1) if window is None or row + later - c < window]
            k = torch.cat([keys[h // group, seen], *(o[h // group, None, i] for o in own[::2])])
            v = torch.cat([values[h // group, seen], *(o[h // group, None, i] for o in own[1::2])])
            scores = k @ query[h, i] / query.shape[-1] ** 0.5
            outs.append(scores.softmax(-1) @ v)
        heads.append(torch.stack(outs))
    return torch.stack(heads)


def gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return list(torch.autograd.grad((out * seed.to(out.dtype)).sum(), given))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("later", [0, 3])
@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.parametrize("kept", [0, cpu.KEPT])
def test_rows_see_what_the_definition_says(
    later: int, window: int | None, chunk: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "KEPT", kept)
    monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(cpu, "ELEMENTS", 1)
    monkeypatch.setattr(cpu, "LEAST", chunk)
    given = inputs(later)
    found, expected = attend(given, window), one_by_one(given, window)
    assert (found - expected).abs().max() < 1e-12
    pairs = zip(gradients(found, given), gradients(expected, given), strict=True)
    assert all((a - b).abs().max() < 1e-10 for a, b in pairs)


def test_who_is_asked(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for wish in ("off", "on"):
        monkeypatch.setenv(VARIABLE, wish)
        assert module.on_cpu(inputs(0)[0]) == (way == "cpu" and wish == "off")


def test_a_window_without_keys_of_step_0_leaves_the_own_ones() -> None:
    """At step 3 with a window of 2, a row sees nothing of step 0."""
    given = inputs(3)
    found, expected = attend(given, 2), one_by_one(given, 2)
    assert (found - expected).abs().max() < 1e-12
    pairs = zip(gradients(found, given), gradients(expected, given), strict=True)
    assert all((a - b).abs().max() < 1e-10 for a, b in pairs)


def test_no_rows_no_output() -> None:
    given = [x[:, :0] if i == 0 else x for i, x in enumerate(inputs(0))]
    assert attend(given, None, rows=[]).shape == (4, 0, 6)


def test_autocast_is_no_worse_than_plain_attention_in_bfloat16() -> None:
    single = [x.detach().float().requires_grad_() for x in inputs(2)]
    exact = inputs(2)
    expected = gradients(one_by_one(exact, None), exact)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(single, None)
        assert out.dtype == torch.bfloat16
        ours = gradients(out, single)
        theirs = gradients(one_by_one(single, None), single)
    for a, b, e in zip(ours, theirs, expected, strict=True):
        assert (a - e).norm() < 1.3 * (b - e).norm() + 0.01 * e.norm()
