"""`headsmith train --profile`: every stage once, bytes from allocations, and nothing changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from headsmith.train.cli import train
from headsmith.train.stages import backward_from, profiling, rises, stage, whole_step


def test_time_belongs_to_the_innermost_stage() -> None:
    with profiling() as stages:
        with stage("data"):
            time.sleep(0.1)  # before the first step
        with whole_step():
            with stage("data"):
                time.sleep(0.02)
                with stage("target"):
                    time.sleep(0.05)
    assert 0.02 <= stages.seconds["data"] < 0.045 < stages.seconds["target"]


def test_without_a_profile_nothing_is_timed_and_no_hook_is_left() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    with whole_step(), stage("loss"):
        backward_from(x, "backward step 1")
    assert x._backward_hooks is None


def test_the_backward_is_told_apart_by_the_gradients_that_arrive() -> None:
    leaf = torch.ones(2, requires_grad=True)
    seen = []
    with profiling() as stages, whole_step():
        first = leaf * 2
        backward_from(first, "backward step 1")
        second = first * 3
        backward_from(second, "backward step 2")
        leaf.register_hook(lambda _: seen.append(stages.switch("other")))
        with stage("loss backward"):
            second.sum().backward()
    assert seen == ["backward step 1"] and leaf.grad is not None
    assert leaf.grad.tolist() == [6, 6]
    assert list(stages.seconds)[:3] == ["other", "loss backward", "backward step 2"]


def event(name: str, start: int, count: int = 0) -> Any:
    return SimpleNamespace(name=lambda: name, start_ns=lambda: start, nbytes=lambda: count)


def test_bytes_are_the_rise_above_the_beginning_of_a_stage() -> None:
    switches = [(0, "other"), (10, "loss"), (20, "optimiser"), (30, "loss"), (40, "other")]
    # The profiler's clock is 1000 ahead; what was allocated earlier may be freed.
    events = [
        event("headsmith: a step begins", 1000),
        event("[memory]", 1005, 7),
        event("[memory]", 1012, 100),
        event("[memory]", 1013, -60),
        event("aten::mm", 1013),
        event("[memory]", 1025, -40),
        event("[memory]", 1035, 30),
        event("[memory]", 1036, 90),
    ]
    assert rises(events, switches) == {"other": 7, "loss": 120, "optimiser": 0}


@pytest.mark.slow
def test_a_profiled_run_trains_the_same_and_shows_every_stage(
    recipe_file: Path, tmp_path: Path, metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    few = ["train.max_steps=4", "validation.holdout=0", "data.max_rows=12", "head.init=balanced"]
    lines = {}
    for name, flags in (("plain", []), ("profiled", ["--profile"])):
        said = CliRunner().invoke(
            train, [str(recipe_file), *few, f"output.dir={tmp_path / name}", *flags]
        )
        assert said.exit_code == 0, said.output
        lines[name] = said.stderr.splitlines()
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "profiled")
    assert not any(line.startswith("stage ") for line in lines["plain"])
    begin = next(i for i, line in enumerate(lines["profiled"]) if line.startswith("stage "))
    shown = {line[:18].strip(): line[18:].split() for line in lines["profiled"][begin + 1 : -1]}
    steps = [f"{way} step {k}" for way in ("unroll", "backward") for k in (1, 2, 3)]
    assert set(shown) == {"data", "target", "loss", "loss backward", "optimiser", "other", *steps}
    shares = [float(share.rstrip("%")) for _, share, _ in shown.values()]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert all(float(shown[name][2]) > 0 for name in ("target", "unroll step 1", "loss"))
