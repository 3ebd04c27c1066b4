"""Whole runs on a tiny target: what they write, what they refuse, and in which words."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.eagle3_config import FLAGS, Eagle3Config
from headsmith.models.eagle3_init import initialise
from headsmith.models.target import Target
from headsmith.train import checkpoint, parts
from headsmith.train.loop import train
from headsmith.train.recipe import Recipe, load_recipe

QUICK = ("train.max_steps=3", "output.save_every=1", "validation.limit=1", "data.max_rows=12")
NO_TAU = (*QUICK, "validation.holdout=0")


@pytest.fixture
def quick(recipe_file: Path) -> Recipe:
    return load_recipe(str(recipe_file), QUICK)


def changed(recipe_file: Path, *overrides: str) -> Recipe:
    return load_recipe(str(recipe_file), [*NO_TAU, *overrides])


def refused(recipe: Recipe, kind: type[HeadsmithError] = HeadsmithError, **how: Any) -> str:
    with pytest.raises(kind) as caught:
        train(recipe, **how)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.slow
def test_what_a_run_writes(quick: Recipe, tmp_path: Path) -> None:
    head, out = train(quick), tmp_path / "out"
    assert head == out / "best" and head.resolve().parent == out
    assert {path.name for path in head.iterdir()} == {
        "config.json", "model.safetensors", "headsmith.json", "trainer.state",
    }  # fmt: skip
    about = json.loads((head / "headsmith.json").read_text())
    assert about["recipe"] == quick.model_dump(mode="json")
    assert about["validation"]["tau"] >= 1.0
    assert about["training"]["tokens"] > 0 and about["head"]["taps"] == [2, 4, 5]
    assert load_file(head / "model.safetensors")["fc.weight"].dtype == torch.float32
    # keep_checkpoints is 2, and the best is one of those that stay.
    kept = {path.name for path in out.glob("step-*")}
    assert {"step-000003", "step-000002", (out / "best").readlink().name} == kept
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2, 3]
    validated = [json.loads(line) for line in (out / "validation.jsonl").read_text().splitlines()]
    best = max(validated, key=lambda line: (line["tau"], line["step"]))
    assert (out / "best").readlink().name == f"step-{best['step']:06}"


@pytest.mark.slow
def test_nothing_that_the_run_did_not_write_is_removed(recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for path in ("step-000777/model.safetensors", "step-000000/x", "notes.txt"):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text("mine")
    train(changed(recipe_file))
    train(changed(recipe_file, "train.seed=1"), overwrite=True)
    assert (out / "step-000777" / "model.safetensors").read_text() == "mine"
    assert (out / "step-000000" / "x").exists() and (out / "notes.txt").exists()


@pytest.mark.slow
def test_what_is_in_the_way_is_not_overwritten(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "step-000002").mkdir(parents=True)
    assert "step-000002 is in the way" in refused(changed(recipe_file))
    assert not list((tmp_path / "out" / "step-000002").iterdir())


@pytest.mark.slow
def test_another_recipes_run_is_refused_unless_told(recipe_file: Path, tmp_path: Path) -> None:
    train(changed(recipe_file))
    other = changed(recipe_file, "train.learning_rate=1e-3", "train.max_steps=4")
    text = refused(other)
    assert "train.max_steps was 3, now 4" in text or "train.learning_rate was 0.002" in text
    assert "holds a run of this recipe;" in refused(changed(recipe_file), resume=False)
    train(other, resume=True)
    steps = [json.loads(s)["step"] for s in (tmp_path / "out" / "metrics.jsonl").open()]
    assert steps == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(recipe_file: Path, tmp_path: Path) -> None:
    train(changed(recipe_file))
    out = tmp_path / "out"
    before = (out / "metrics.jsonl").read_text().splitlines()
    state = out / "step-000003" / checkpoint.STATE
    state.write_bytes(state.read_bytes()[:1000])
    train(changed(recipe_file))
    after = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(s)["loss"] for s in before] == [json.loads(s)["loss"] for s in after]
    torch.load(state, weights_only=True)


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_half_written(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out, save = changed(recipe_file), tmp_path / "out", torch.save

    def full(state: dict[str, Any], path: Path) -> None:
        save(state, path)
        if state["step"] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(checkpoint.torch, "save", full)
    text = refused(recipe, EnvironmentFault)
    assert "disk is full" in text and EnvironmentFault.exit_code == 4
    assert [path.name for path in out.glob("step-*")] == ["step-000001"]
    assert not list(out.glob(".*"))
    monkeypatch.setattr(checkpoint.torch, "save", save)
    train(recipe)
    assert (out / "latest").readlink().name == "step-000003"


def test_an_output_folder_that_cannot_be(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recipe = changed(recipe_file, f"output.dir={tmp_path / 'file' / 'out'}")
    assert "cannot be written (Not a directory)" in refused(recipe, EnvironmentFault)


def test_a_folder_of_another_program_is_left_alone(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    assert "was not written by headsmith" in refused(changed(recipe_file))


def test_data_without_an_assistant_turn(recipe_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "silent.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    text = refused(changed(recipe_file, f"data.source={path}"))
    assert str(path) in text


def test_empty_data(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    path = tmp_path / "empty.jsonl"
    assert str(path) in refused(changed(recipe_file, f"data.source={path}"))


def test_a_target_whose_weights_hold_nan(
    recipe_file: Path, target_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(target_dir, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    assert "hold NaN" in refused(changed(recipe_file, f"target.path={broken}"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("head.taps=[2, 99, 5]", "taps [2, 99, 5] must be ascending"),
        ("head.taps=[2, 5, 99]", "tap 99 is outside 0..8"),
        ("head.draft_vocab_size=301", "must be from 1 to 300"),
        ("head.init_from=/nowhere", "head /nowhere does not exist"),
        ("validation.draft=chain:-1", "depth is -1"),
        ("validation.draft=vine:3", "vine:3"),
        ("validation.prompts=/nowhere.jsonl", "/nowhere.jsonl"),
        ("target.path=/nowhere", "target /nowhere does not exist"),
        ("data.source=/nowhere.jsonl", "/nowhere.jsonl"),
    ],
)
def test_settings_that_do_not_fit(recipe_file: Path, override: str, said: str) -> None:
    assert said in refused(changed(recipe_file, override))


@pytest.mark.slow
def test_a_run_that_never_started_does_not_block_the_folder(recipe_file: Path) -> None:
    refused(changed(recipe_file, "head.draft_vocab_size=301"))
    train(changed(recipe_file))


def test_features_that_do_not_fit_in_memory(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(available=1000)
    monkeypatch.setattr(parts.psutil, "virtual_memory", lambda: free)
    text = refused(changed(recipe_file, "data.keep_features=memory", "train.max_steps=9"))
    assert "set data.keep_features=none" in text


@pytest.mark.slow
def test_a_run_may_start_from_another_head(recipe_file: Path, tmp_path: Path) -> None:
    first = train(changed(recipe_file)).resolve()
    second = changed(recipe_file, f"head.init_from={first}", f"output.dir={tmp_path / 'b'}")
    train(second)
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("out", "b")
    ]
    assert losses[1][0] < losses[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [("norm_before_fc", "norm_before_residual"), ("fc_norm", "norm_output")]
)
def test_a_head_that_is_trained_further_keeps_its_flags(
    recipe_file: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    recipe = load_recipe(str(recipe_file))
    target = Target.load(recipe.target.path)
    ids = torch.arange(0, target.vocab_size, 3)
    on: dict[str, Any] = dict.fromkeys(flags, True)
    head = Eagle3Head(replace(Eagle3Config.for_target(target, len(ids)), **on), ids)
    initialise(head, target.head_weight[ids], seed=0)
    head.save(tmp_path / "theirs")
    start = f"head.init_from={tmp_path / 'theirs'}"
    best = train(changed(recipe_file, start, "train.max_steps=12"))
    after = Eagle3Head.load(best, num_target_layers=target.num_layers)
    told = json.loads((best / "headsmith.json").read_text())["head"]
    for flag in FLAGS:
        assert getattr(after.config, flag) is told[flag] is (flag in flags)
    moved = dict(after.named_parameters())
    still = [n for n, p in head.named_parameters() if torch.equal(p, moved[n])]
    assert still == []


def test_a_flag_that_the_head_to_start_from_does_not_have(
    recipe_file: Path, target_dir: Path, tmp_path: Path
) -> None:
    Eagle3Head.for_target(Target.load(target_dir), torch.arange(64)).save(tmp_path / "old")
    more = (f"head.init_from={tmp_path / 'old'}", "head.kind=eagle3.1")
    text = refused(changed(recipe_file, *more))
    assert "asks for fc_norm (head.kind eagle3.1)" in text and "start a fresh head" in text
