"""Compaction: bit for bit what indexing with a copy gives, in every layer, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from headsmith.inference.kernels.compaction import Stores, compact, reference

SLOTS, GROUPS, CAPACITY = 4, 3, 40
PATHS = [[0, 2, 3, 9, 10, 11, 17], [0, 1, 2], [0], [0, 1, 5]]
STARTS = [3, 0, 12, 37 - 5]


def layers(dtype: torch.dtype, d: int) -> list[Tensor]:
    """Three layers, the last of other sizes; every element is a different number."""
    shapes = [(SLOTS, GROUPS, CAPACITY, d)] * 4 + [(SLOTS, 1, CAPACITY, 2 * d)] * 2
    made = []
    for i, shape in enumerate(shapes):
        count = torch.Size(shape).numel()
        bits = torch.arange(i, i + count, dtype=torch.int64) * 7919
        made.append((bits % 30011).to(torch.int16).view(shape).to(dtype))
    return made


def tables(paths: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots in another order than the requests, and garbage behind the end of each path."""
    longest = max(map(len, paths))
    rows = [path + [999] * (longest - len(path)) for path in paths]
    slots = torch.tensor([2, 0, 3, 1][: len(paths)], dtype=torch.int32)
    starts = torch.tensor(STARTS[: len(paths)], dtype=torch.int32)
    counts = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    return slots, starts, torch.tensor(rows, dtype=torch.int32), counts


@pytest.mark.parametrize("d", [64, 96, 128, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_paths_move_as_the_reference_moves_them(dtype: torch.dtype, d: int) -> None:
    if d == 3 and dtype == torch.bfloat16:
        d = 5
    expected, found = layers(dtype, d), layers(dtype, d)
    for run, made in ((reference, expected), (compact, found)):
        for stores in Stores.of(made):
            run(stores, *tables(PATHS))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    before = layers(dtype, d)
    moved = expected[0][2, :, 3:10]
    assert torch.equal(moved, before[0][2, :, [3 + n for n in PATHS[0]]])
    assert torch.equal(expected[0][0], before[0][0]), "a path in place moves nothing"


def test_stores_of_one_shape_share_a_launch() -> None:
    assert [len(s.tensors) for s in Stores.of(layers(torch.float32, 8))] == [4, 2]


WRONG = {
    "rows land one too far": ("(start + order)", "(start + order + 1)"),
    "the row behind the path moves too": ("order < tl.load(counts", "order <= tl.load(counts"),
    "the last word of a row is left": ("word < WORDS)", "word < WORDS - 1)"),
    "only the first layer": ("pointers + tl.program_id(0)", "pointers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_caught(
    name: str, mutant: Callable[[ModuleType, str, str], ModuleType]
) -> None:
    from headsmith.inference.kernels import compaction_triton

    # A row behind the shorter path, so that moving it is no error of memory.
    paths = [[0, 2, 3, 9], [0, 4, 5, 6]]
    slots, starts, rows, counts = tables(paths)
    counts[1] = 3
    expected, found = layers(torch.bfloat16, 8), layers(torch.bfloat16, 8)
    wrong = mutant(compaction_triton, *WRONG[name])
    for a, b in zip(Stores.of(expected), Stores.of(found), strict=True):
        reference(a, slots, starts, rows, counts)
        wrong.launch(b, slots, starts, rows, counts)
    assert not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
