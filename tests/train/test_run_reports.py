"""What a run tells: trackers, the plan, the command line."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from headsmith import cli as face
from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.train import loop, trackers
from headsmith.train.cli import train as command
from headsmith.train.loop import save_steps, train
from headsmith.train.plan import make_plan
from headsmith.train.recipe import Recipe, load_recipe

QUICK = ("train.max_steps=3", "output.save_every=1", "validation.limit=1", "data.max_rows=12")
NO_TAU = (*QUICK, "validation.holdout=0")


def changed(recipe_file: Path, *overrides: str) -> Recipe:
    return load_recipe(str(recipe_file), [*NO_TAU, *overrides])


def test_a_tracker_that_is_not_installed(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="pip install wandb") as fault:
        train(changed(recipe_file, "output.tracker=wandb"))
    assert "\n" not in str(fault.value)


def test_wandb_without_a_key_stays_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    trackers.check_tracker("wandb")
    assert os.environ["WANDB_MODE"] == "offline"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    trackers.check_tracker("wandb")
    assert "WANDB_MODE" not in os.environ


@pytest.mark.slow
def test_tensorboard_gets_the_scalars(recipe_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(changed(recipe_file, "output.tracker=tensorboard", "output.project=probe"))
    assert list((tmp_path / "out").rglob("events.out.tfevents*"))


def test_the_plan_trains_nothing_and_knows_the_run(recipe_file: Path, tmp_path: Path) -> None:
    plan = make_plan(load_recipe(str(recipe_file), QUICK))
    assert not (tmp_path / "out").exists()
    assert plan.target_parameters == 285_248 and plan.taps == (2, 4, 5)
    body = plan.head_trained - plan.head_body
    assert body == 64 * 64 and plan.draft_vocab == 64
    assert plan.corpus.batches.total_steps == 3 and plan.saves == 3
    assert all(size > 0 for size in plan.memory.values())


def test_the_plan_finds_the_faults_of_the_recipe(recipe_file: Path) -> None:
    with pytest.raises(HeadsmithError, match="must be ascending"):
        make_plan(changed(recipe_file, "head.taps=[5, 2]"))


def test_the_plan_is_printed(recipe_file: Path) -> None:
    result = CliRunner().invoke(command, [str(recipe_file), *QUICK, "--plan"])
    assert result.exit_code == 0 and "loss rows an epoch" in result.output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["{recipe}", "train.epoch=1"], 2),
        (["nowhere"], 2),
        (["{recipe}", "--resume", "--overwrite"], 2),
    ],
)
def test_mistakes_on_the_command_line(
    recipe_file: Path, arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(recipe=recipe_file) for argument in arguments]
    assert face.run(face.cli, ["train", *given]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_checkpoints_are_spread_and_the_last_step_has_one(recipe_file: Path) -> None:
    spread = changed(recipe_file, "output.save_every=null", "validation.times=4")
    assert save_steps(spread, 10) == {2, 5, 8, 10}
    assert save_steps(spread, 2) == {1, 2}
    assert save_steps(changed(recipe_file, "output.save_every=4"), 10) == {4, 8, 10}
    assert loop.save_steps(changed(recipe_file, "output.save_every=40"), 10) == {10}
