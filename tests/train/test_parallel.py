"""Real processes that share a head in every way train to the losses of one, go on from each other's
checkpoints, and end when one of them is killed.
"""

import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
STEPS = 20
RUN = (f"train.max_steps={STEPS}", "train.epochs=9", "validation.holdout=0")
WAYS: dict[str, dict[str, str]] = {
    "ddp": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}
NO_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed: headsmith[deepspeed]"
)
every_way = pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=NO_DEEPSPEED if "zero" in way else ()) for way in WAYS],
)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The run of a single process, made by the first test that asks."""
    return {}


def single(alone: dict[str, Any], tmp: Path, recipe: Path, training: Any, metrics: Any) -> Any:
    if not alone:
        out = tmp / "alone"
        training(tmp / "log", recipe, *RUN, f"output.dir={out}").finish()
        alone["losses"] = [line["loss"] for line in metrics(out)]
        alone["norms"] = [line["gradient_norm"] for line in metrics(out)]
        alone["weights"] = load_file(out / "latest" / "model.safetensors")
        alone["state"] = torch.load(out / "latest" / "trainer.state", weights_only=True)
    return alone


@every_way
def test_the_losses_and_the_checkpoint_are_those_of_one_process(
    way: str,
    alone: dict[str, Any],
    recipe_file: Path,
    tmp_path: Path,
    training: Any,
    group: Any,
    metrics: Any,
) -> None:
    expected = single(alone, tmp_path, recipe_file, training, metrics)
    out = tmp_path / "out"
    for process in group(training, tmp_path / "logs", 2, recipe_file, *RUN, **WAYS[way]):
        assert "Traceback" not in process.finish()
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == pytest.approx(expected["losses"], abs=1e-4)
    assert [line["gradient_norm"] for line in lines] == pytest.approx(expected["norms"], rel=1e-3)
    assert expected["losses"][-1] < expected["losses"][0] - 0.1
    weights = load_file(out / "latest" / "model.safetensors")
    assert set(weights) == set(expected["weights"])
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-2, atol=1e-4)
    same_state(torch.load(out / "latest" / "trainer.state", weights_only=True), expected["state"])


def same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """A checkpoint is that of a single process: the same keys, shapes, groups and moments."""
    assert state["step"] == expected["step"] and state["tokens"] == expected["tokens"]
    (found,), (wanted,) = state["optimisers"], expected["optimisers"]
    assert set(found["state"]) == set(wanted["state"])
    for index, moments in wanted["state"].items():
        assert set(found["state"][index]) == set(moments)
        assert float(found["state"][index]["step"]) == float(moments["step"]) == STEPS
        for key in ("exp_avg", "exp_avg_sq"):
            mine = found["state"][index][key]
            assert type(mine) is torch.Tensor and mine.dtype == torch.float32
            size = float(moments[key].abs().max())
            torch.testing.assert_close(mine, moments[key], rtol=0, atol=1e-3 * size)
    for mine, group in zip(found["param_groups"], wanted["param_groups"], strict=True):
        assert mine["params"] == group["params"] and set(mine) == set(group)
        for key in ("lr", "weight_decay", "betas", "scale"):
            assert mine.get(key) == pytest.approx(group.get(key)), key


def stop_at(processes: list[Any], folder: Path, step: int) -> None:
    """Ask all for an orderly end once the run has come to `step`."""
    processes[0].wait_for_step(folder, step)
    for process in processes:
        process.signal(signal.SIGTERM)
    for process in processes:
        assert "Traceback" not in process.finish(128 + signal.SIGTERM)


@every_way
def test_one_process_two_and_one_again(
    way: str,
    alone: dict[str, Any],
    recipe_file: Path,
    tmp_path: Path,
    training: Any,
    group: Any,
    metrics: Any,
) -> None:
    """Each goes on from what the others wrote, and the curve is that of an undisturbed run."""
    expected = single(alone, tmp_path, recipe_file, training, metrics)
    out, command = tmp_path / "out", (recipe_file, *RUN)
    stop_at([training(tmp_path / "one", *command)], out, 4)
    stop_at(group(training, tmp_path / "two", 2, *command, **WAYS[way]), out, 11)
    assert "continuing the run" in (tmp_path / "two" / "0").read_text()
    reached = metrics(out)[-1]["step"]
    assert 11 <= reached < STEPS
    assert f"after step {reached}" in training(tmp_path / "last", *command).finish()
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == pytest.approx(expected["losses"], abs=1e-4)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", pytest.param("zero2", marks=NO_DEEPSPEED)])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_other_with_a_sentence(
    way: str, killed: int, recipe_file: Path, tmp_path: Path, training: Any, group: Any
) -> None:
    run = (recipe_file, "train.epochs=500", "validation.holdout=0")
    processes = group(training, tmp_path / "logs", 2, *run, **WAYS[way])
    processes[0].wait_for_step(tmp_path / "out", 3)
    processes[killed].signal(signal.SIGKILL)
    began = time.monotonic()
    said = processes[1 - killed].finish(4, timeout=60)
    assert time.monotonic() - began < 60
    assert "Traceback" not in said and "the same command continues" in said.splitlines()[-1]
    processes[killed].finish(-signal.SIGKILL)


def test_a_process_that_hangs_ends_the_other(
    recipe_file: Path, tmp_path: Path, training: Any, group: Any
) -> None:
    """No connection breaks, so only the missing signs of life tell it."""
    run = (recipe_file, "train.epochs=500", "validation.holdout=0")
    processes = group(training, tmp_path / "logs", 2, *run, HEADSMITH_SILENCE="6")
    processes[0].wait_for_step(tmp_path / "out", 3)
    processes[1].signal(signal.SIGSTOP)
    try:
        said = processes[0].finish(4, timeout=60)
    finally:
        processes[1].signal(signal.SIGKILL)
    assert "process 1 of this run gives no sign of life" in said and "Traceback" not in said


def test_the_fault_of_one_process_is_told_by_the_other(
    recipe_file: Path, tmp_path: Path, training: Any, group: Any
) -> None:
    """The first cannot write; the other, which waits for it, says why it ends."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    processes = group(training, tmp_path / "logs", 2, recipe_file, *RUN)
    assert "was not written by headsmith" in processes[0].finish(2)
    said = processes[1].finish(4, timeout=60)
    assert "process 0 of this run ended" in said and "was not written by headsmith" in said


@pytest.mark.parametrize("head", [(), ("head.kind=medusa", "head.num_heads=3")])
@pytest.mark.parametrize("keep", ["none", "memory"])
def test_a_target_in_shares_gives_the_same_run(
    keep: str,
    head: tuple[str, ...],
    recipe_file: Path,
    tmp_path: Path,
    training: Any,
    group: Any,
    metrics: Callable[[Path], Any],
) -> None:
    """Validation too, of which each answers its share; three prompts leave one of them idle."""
    run = (recipe_file, *head, "train.max_steps=6", "train.epochs=4", f"data.keep_features={keep}")
    run = (*run, "data.max_rows=20", "validation.limit=3", "output.save_every=3")
    training(tmp_path / "log", *run, f"output.dir={tmp_path / 'one'}").finish()
    shared = (*run, "target.parallel=sharded", f"output.dir={tmp_path / 'out'}")
    for process in group(training, tmp_path / "logs", 2, *shared):
        assert "Traceback" not in process.finish()
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "out")
    for line, other in zip(one, two, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], abs=1e-5)
        assert other["rows"] == line["rows"] and other["tokens"] == line["tokens"]
    taus = [(tmp_path / name / "validation.jsonl").read_text() for name in ("one", "out")]
    assert taus[0] == taus[1]
