"""Real processes that share a head in every way train to the losses of one, write its checkpoints
and go on from them; a process that is gone ends the others.
"""

import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
STEPS = 20
RUN = (f"train.max_steps={STEPS}", "train.epochs=9", "output.save_every=5")
RUN = (*RUN, "output.keep_checkpoints=9", "validation.limit=3", "validation.max_new_tokens=4")
MEDUSA = ("head.kind=medusa", "head.num_heads=3", "head.lm_head=truncated")
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
    "way", [pytest.param(way, marks=NO_DEEPSPEED if "zero" in way else ()) for way in WAYS]
)


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """What the first test of this file made for all."""
    return {}


@pytest.fixture
def alone(
    made: dict[str, Any],
    recipe_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    training: Any,
    metrics: Any,
) -> Any:
    """The run of a single process, and the recipe that it had."""
    if not made:
        folder = tmp_path_factory.mktemp("alone")
        recipe = shutil.copy(recipe_file, folder)
        training(folder / "log", recipe, *RUN, f"output.dir={folder / 'out'}").finish()
        made.update(recipe=recipe, out=folder / "out", lines=metrics(folder / "out"))
    return SimpleNamespace(**made)


def same_curve(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["rows"] for line in lines] == [line["rows"] for line in expected]
    for key in ("loss", "gradient_norm", "learning_rate"):
        wanted = [line[key] for line in expected]
        assert [line[key] for line in lines] == pytest.approx(wanted, abs=1e-4), key


def same_checkpoint(folder: Path, expected: Path) -> None:
    """The files are those of a single process: the same names, shapes, groups and moments."""
    weights, wanted = (load_file(one / "model.safetensors") for one in (folder, expected))
    assert set(weights) == set(wanted)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-2, atol=1e-4)
    mine, theirs = (
        torch.load(one / "trainer.state", weights_only=True) for one in (folder, expected)
    )
    assert mine["step"] == theirs["step"] and mine["tokens"] == theirs["tokens"]
    (found,), (known,) = mine["optimisers"], theirs["optimisers"]
    assert set(found["state"]) == set(known["state"])
    for index, moments in known["state"].items():
        assert set(found["state"][index]) == set(moments)
        assert float(found["state"][index]["step"]) == float(moments["step"]) == STEPS
        for key in ("exp_avg", "exp_avg_sq"):
            moment = found["state"][index][key]
            assert type(moment) is torch.Tensor and moment.dtype == torch.float32
            size = float(moments[key].abs().max())
            torch.testing.assert_close(moment, moments[key], rtol=0, atol=1e-3 * size)
    for group, other in zip(found["param_groups"], known["param_groups"], strict=True):
        assert set(group) == set(other) and group["params"] == other["params"]
        for key in ("lr", "weight_decay", "betas", "scale"):
            assert group.get(key) == pytest.approx(other.get(key)), key


@every_way
def test_losses_and_checkpoint_are_those_of_one_process(
    way: str, alone: Any, tmp_path: Path, training: Any, group: Any, metrics: Any
) -> None:
    out = tmp_path / "out"
    run = (alone.recipe, *RUN, f"output.dir={out}")
    for process in group(training, tmp_path / "logs", 2, *run, **WAYS[way]):
        assert "Traceback" not in process.finish()
    same_curve(metrics(out), alone.lines)
    same_checkpoint(out / "latest", alone.out / "latest")
    # Each of the two answered some of the three prompts.
    name = "validation.jsonl"
    assert (out / name).read_text() == (alone.out / name).read_text()


def stopped(out: Path, step: int, to: Path) -> Path:
    """A copy of a run's folder as it was when `step` was saved."""
    shutil.copytree(out, to, symlinks=True)
    for path in to.glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return to


@every_way
def test_one_process_then_two_then_one(
    way: str, alone: Any, tmp_path: Path, training: Any, group: Any, metrics: Any
) -> None:
    """Each goes on from what the others wrote, and the curve is that of an undisturbed run."""
    two = stopped(alone.out, 5, tmp_path / "two")
    run = (alone.recipe, *RUN)
    processes = group(training, tmp_path / "logs", 2, *run, f"output.dir={two}", **WAYS[way])
    said = [process.finish() for process in processes]
    assert "after step 5" in said[0] and "Traceback" not in "".join(said)
    same_curve(metrics(two), alone.lines)
    last = stopped(two, 15, tmp_path / "last")
    assert "after step 15" in training(tmp_path / "log", *run, f"output.dir={last}").finish()
    same_curve(metrics(last), alone.lines)
    same_checkpoint(last / "latest", alone.out / "latest")


ENDLESS = ("train.epochs=500", "validation.holdout=0")


@pytest.mark.parametrize(("way", "killed"), [("ddp", 0), ("fsdp2", 1)])
def test_a_killed_process_ends_the_other_with_a_sentence(
    way: str, killed: int, recipe_file: Path, tmp_path: Path, training: Any, group: Any
) -> None:
    processes = group(training, tmp_path / "logs", 2, recipe_file, *ENDLESS, **WAYS[way])
    processes[0].wait_for_step(tmp_path / "out", 3)
    processes[killed].signal(signal.SIGKILL)
    began = time.monotonic()
    said = processes[1 - killed].finish(4, timeout=60)
    assert time.monotonic() - began < 60
    assert "Traceback" not in said and "the same command continues" in said.splitlines()[-1]


def test_a_signal_to_one_process_stops_all_in_order(
    recipe_file: Path, tmp_path: Path, training: Any, group: Any, metrics: Any
) -> None:
    out = tmp_path / "out"
    processes = group(training, tmp_path / "logs", 2, recipe_file, *ENDLESS, **WAYS["fsdp2"])
    processes[0].wait_for_step(out, 2)
    processes[1].signal(signal.SIGTERM)
    said = [process.finish(128 + signal.SIGTERM, timeout=60) for process in processes]
    reached = metrics(out)[-1]["step"]
    assert f"stopped after step {reached}" in said[0] and "error" not in "".join(said)
    assert (out / "latest").resolve().name == f"step-{reached:06}"


def test_a_process_that_hangs_ends_the_other(
    recipe_file: Path, tmp_path: Path, training: Any, group: Any
) -> None:
    """No connection breaks, so only the missing signs of life tell it."""
    run = (recipe_file, *ENDLESS)
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
    """The first cannot use the folder; the other, which waits for it, says why it ends."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    processes = group(training, tmp_path / "logs", 2, recipe_file, *ENDLESS)
    assert "was not written by headsmith" in processes[0].finish(2)
    said = processes[1].finish(4, timeout=60)
    assert "process 0 of this run ended: " in said and "was not written by headsmith" in said


@pytest.mark.parametrize("more", [MEDUSA, ("data.keep_features=memory",)])
def test_a_target_in_shares_gives_the_same_run(
    more: tuple[str, ...],
    recipe_file: Path,
    tmp_path: Path,
    training: Any,
    group: Any,
    metrics: Any,
) -> None:
    """Validation too, of three prompts, of which one process has the fewer; with rows in memory the
    one has nothing to run where the other has.
    """
    run = (recipe_file, *more, "train.max_steps=6", "train.epochs=4", "data.max_rows=20")
    run = (*run, "validation.limit=3", "output.save_every=3", "validation.max_new_tokens=6")
    training(tmp_path / "log", *run, f"output.dir={tmp_path / 'one'}").finish()
    shared = (*run, "target.parallel=sharded", f"output.dir={tmp_path / 'out'}")
    for process in group(training, tmp_path / "logs", 2, *shared):
        assert "Traceback" not in process.finish()
    for line, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "out"), strict=True):
        assert other["loss"] == pytest.approx(line["loss"], abs=1e-5)
        assert other["rows"] == line["rows"] and other["tokens"] == line["tokens"]
    told = [(tmp_path / name / "validation.jsonl").read_text() for name in ("one", "out")]
    assert told[0] == told[1]


def test_a_target_in_shares_is_captured_as_it_is(
    recipe_file: Path, tmp_path: Path, captures: Any, group: Any
) -> None:
    """Each of the two has other shards to fill, and not equally many rows."""
    common = (recipe_file, "data.row_tokens=128", "--shard-mb=0.1", "--dtype=float32")
    captures(tmp_path / "log", *common, "--out", tmp_path / "one").finish()
    shared = (*common, "target.parallel=sharded", "--out", tmp_path / "two")
    for process in group(captures, tmp_path / "logs", 2, *shared):
        assert "Traceback" not in process.finish()
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("shard-*.safetensors")}
        for name in ("one", "two")
    ]
    assert len(files[0]) > 2 and files[0] == files[1]
