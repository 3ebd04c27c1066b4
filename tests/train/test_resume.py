"""A run that is killed goes on as if it had not been: the same losses to the last digit."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_five_kills_change_nothing(
    recipe_file: Path, tmp_path: Path, training: Any, metrics: Any
) -> None:
    killed, whole, log = tmp_path / "killed", tmp_path / "whole", tmp_path / "log"
    common = (
        recipe_file,
        "data.keep_features=memory",
        "output.save_every=3",
        "validation.limit=1",
        "validation.max_new_tokens=4",
    )
    training(log, *common, f"output.dir={whole}").finish()
    total = metrics(whole)[-1]["step"]
    chooser = random.Random(time.time_ns())
    for kill in range(5):
        process = training(log, *common, f"output.dir={killed}")
        process.wait_for_step(killed, max(1, total * kill // 6 + chooser.randint(0, 3)))
        time.sleep(chooser.uniform(0, 0.1))
        process.signal(signal.SIGKILL)
        process.finish(-signal.SIGKILL)
    assert "continuing the run" in training(log, *common, f"output.dir={killed}").finish()
    assert metrics(killed) == metrics(whole)
    assert [line["step"] for line in metrics(killed)] == list(range(1, total + 1))
    assert not [path.name for path in killed.glob(".*")]
    for name in ("latest/model.safetensors", "validation.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert (killed / "best").readlink() == (whole / "best").readlink()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_goes_on(
    recipe_file: Path,
    tmp_path: Path,
    training: Any,
    metrics: Any,
    number: signal.Signals,
    code: int,
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    common = (recipe_file, "output.save_every=1000", "validation.holdout=0")
    process = training(log, *common)
    process.wait_for_step(out, 2)
    process.signal(number)
    said = process.finish(code)
    reached = metrics(out)[-1]["step"]
    assert f"stopped after step {reached}" in said and "Traceback" not in said
    assert (out / "latest").resolve().name == f"step-{reached:06}"
    assert f"after step {reached}" in training(log, *common).finish()
    steps = [line["step"] for line in metrics(out)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_finished_run_has_nothing_left_to_do(
    recipe_file: Path, tmp_path: Path, training: Any, metrics: Any
) -> None:
    common = (tmp_path / "log", recipe_file, "train.max_steps=2", "validation.holdout=0")
    training(*common).finish()
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    training(*common).finish()
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before
