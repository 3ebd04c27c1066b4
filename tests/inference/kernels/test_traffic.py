"""Bytes counted by hand, and the choice between kernels and references."""

from __future__ import annotations

import pytest
import torch

from headsmith.errors import HeadsmithError
from headsmith.inference.kernels import use_kernels
from headsmith.inference.kernels.head_input import attention_input
from headsmith.inference.kernels.lm_head import best_tokens
from headsmith.inference.kernels.traffic import SCRATCH, counting


def test_bytes_of_a_concatenation() -> None:
    """Every element once, the masked ones behind the width not at all."""
    embeds, z = torch.ones(5, 72), torch.ones(5, 72)
    first, second = torch.ones(72), torch.ones(72)
    with counting() as traffic:
        out = attention_input(embeds, z, first, second)
    named = {"embeds": embeds, "z": z, "first": first, "second": second, "out": out}
    moved = traffic.by_tensor(named)
    row = 72 * 4
    assert moved == {
        "embeds": 5 * row,
        "z": 5 * row,
        "first": 5 * row,
        "second": 5 * row,
        "out": 10 * row,
        SCRATCH: 0,
    }


def test_the_output_matrix_is_read_once() -> None:
    x, weight = torch.ones(3, 40, dtype=torch.bfloat16), torch.ones(300, 40, dtype=torch.bfloat16)
    with counting() as traffic:
        best = best_tokens(x, weight, 2)
    moved = traffic.by_tensor({"x": x, "weight": weight, **best._asdict()})
    assert moved["weight"] == weight.nbytes
    # Three tiles of 128 ids, each of which reads the states.
    assert moved["x"] == 3 * x.nbytes
    assert moved["logits"] == best.logits.nbytes and moved["lse"] == best.lse.nbytes
    # Of a tile and row two logits and two statistics, written once and read once; two ids are
    # written, and of all tiles the two that won are read.
    assert moved[SCRATCH] == 3 * 3 * (2 * (2 * 4 + 2 * 4) + 2 * 4) + 3 * 2 * 4


def test_counting_ends() -> None:
    with counting() as traffic:
        pass
    attention_input(*torch.ones(2, 3, 8), *torch.ones(2, 8))
    assert traffic.events == []


def test_kernels_are_chosen_by_device_and_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    chosen = {}
    for wish in ("on", "off", "auto"):
        monkeypatch.setenv("HEADSMITH_KERNELS", wish)
        chosen[wish] = (use_kernels(cpu), use_kernels(gpu))
    assert chosen == {"on": (True, True), "off": (False, False), "auto": (False, True)}
    monkeypatch.setenv("HEADSMITH_KERNELS", "yes")
    with pytest.raises(HeadsmithError, match="HEADSMITH_KERNELS=yes is not one of auto, on, off"):
        use_kernels(cpu)


def test_without_triton_the_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headsmith.inference.kernels._installed", lambda: False)
    with pytest.raises(HeadsmithError, match="needs Triton"):
        use_kernels(torch.device("cpu"))
    monkeypatch.setenv("HEADSMITH_KERNELS", "auto")
    assert not use_kernels(torch.device("cuda"))
