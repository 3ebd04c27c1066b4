"""A run that is killed goes on as if it had not been: the same losses to the last digit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def start(recipe: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "headsmith.train", str(recipe), *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    _, said = process.communicate(timeout=300)
    assert process.returncode == code, said
    return said


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    text = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in text if line.endswith("}")]


def compared(folder: Path) -> list[dict[str, Any]]:
    """What must not depend on kills: all but the time."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines(folder)]


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    while process.poll() is None and (not lines(folder) or lines(folder)[-1]["step"] < step):
        time.sleep(0.005)


def test_five_kills_change_nothing(recipe_file: Path, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    common = ("train.epochs=6", "output.save_every=3", "validation.holdout=0")
    finish(start(recipe_file, f"output.dir={whole}", *common))
    total = lines(whole)[-1]["step"]
    chooser = random.Random(0)
    for kill in range(5):
        process = start(recipe_file, f"output.dir={killed}", *common)
        wait_for_step(process, killed, max(1, total * (kill + 1) // 6))
        time.sleep(chooser.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    said = finish(start(recipe_file, f"output.dir={killed}", *common))
    assert "continuing the run" in said
    assert compared(killed) == compared(whole)
    assert [line["step"] for line in lines(killed)] == list(range(1, total + 1))
    assert not list(killed.glob(".*"))
    ours, theirs = (folder / "latest" / "model.safetensors" for folder in (killed, whole))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_goes_on(
    recipe_file: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "out"
    process = start(recipe_file, "output.save_every=1000", "validation.holdout=0")
    wait_for_step(process, out, 2)
    process.send_signal(number)
    said = finish(process, code)
    reached = lines(out)[-1]["step"]
    assert f"stopped after step {reached}" in said and "Traceback" not in said
    assert (out / "latest").resolve().name == f"step-{reached:06}"
    said = finish(start(recipe_file, "output.save_every=1000", "validation.holdout=0"))
    assert f"after step {reached}" in said
    steps = [line["step"] for line in lines(out)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_finished_run_has_nothing_left_to_do(recipe_file: Path, tmp_path: Path) -> None:
    finish(start(recipe_file, "train.max_steps=2", "validation.holdout=0"))
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    finish(start(recipe_file, "train.max_steps=2", "validation.holdout=0"))
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before
