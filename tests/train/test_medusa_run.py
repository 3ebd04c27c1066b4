"""Runs that train Medusa heads, and what their recipes may say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headsmith.errors import HeadsmithError
from headsmith.models.heads import load_head
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import LmHead
from headsmith.models.target import Target
from headsmith.train.kinds import loss_settings
from headsmith.train.loop import train
from headsmith.train.loss import LossSettings
from headsmith.train.plan import make_plan
from headsmith.train.recipe import Recipe, load_recipe

K = 3
KINDS: list[LmHead] = ["shared", "private", "truncated"]


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target.load(target_dir, dtype=torch.float64)


MEDUSA = ("head.kind=medusa", "head.num_heads=3", "head.draft_vocab_size=null")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("head.lm_head=private", "head.loss=mix"),
        ("head.lm_head=truncated", "head.draft_vocab_size=64", "head.loss=ce"),
    ],
    ids=KINDS,
)
def test_a_run_lowers_the_loss_and_leaves_a_head_that_loads(
    overrides: tuple[str, ...], recipe_file: Path, tmp_path: Path, target_dir: Path
) -> None:
    quick = ("train.epochs=3", "validation.limit=2", "validation.times=1", "train.unroll_growth=.5")
    recipe = load_recipe(str(recipe_file), [*MEDUSA, *quick, *overrides])
    best = train(recipe)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert all(len(line["losses"]) == 3 for line in lines), "no growth: all heads from the start"
    for k in range(3):
        first, last = lines[0]["losses"][k], lines[-1]["losses"][k]
        assert last < 0.95 * first, (k, first, last)
    assert lines[-1]["predicted_tau"] >= 1
    about = json.loads((best / "headsmith.json").read_text())
    assert about["head"]["kind"] == "medusa" and about["head"]["num_heads"] == 3
    assert about["head"]["lm_head"] == recipe.head.lm_head
    assert about["validation"]["tau"] >= 1
    head = load_head(best, Target.load(target_dir))
    assert isinstance(head, MedusaHead) and head.config.lm_head == recipe.head.lm_head


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(
    recipe_file: Path, tmp_path: Path, metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    def run(folder: str, *more: str) -> list[dict[str, Any]]:
        given = [*MEDUSA, "validation.holdout=0", "output.save_every=2", "data.max_rows=12"]
        out = f"output.dir={tmp_path / folder}"
        train(load_recipe(str(recipe_file), [*given, "train.max_steps=4", out, *more]))
        return metrics(tmp_path / folder)

    whole = run("whole")
    run("parts")
    for name in ("step-000004", "latest"):
        path = tmp_path / "parts" / name
        path.rename(tmp_path / f"gone-{name}")
    assert run("parts") == whole


def test_the_plan_counts_what_is_trained(recipe_file: Path) -> None:
    block = 64 * 64 + 64
    for overrides, lm_heads in (
        ((), 0),
        (("head.lm_head=private",), 3 * 300 * 64),
        (("head.lm_head=truncated", "head.draft_vocab_size=64"), 64 * 64),
    ):
        plan = make_plan(load_recipe(str(recipe_file), [*MEDUSA, *overrides]))
        assert plan.head_body == 3 * block and plan.head_trained == 3 * block + lm_heads
        assert plan.taps == () and plan.corpus.batches.num_steps == 3
        assert all(size > 0 for size in plan.memory.values())
        copy = 0 if lm_heads else 4 * 300 * 64
        assert plan.checkpoint == 12 * plan.head_trained + copy


def test_the_plan_counts_every_head_in_every_step(recipe_file: Path) -> None:
    """An unroll that grows is not for heads that are trained all at once."""
    growing = ("train.unroll_steps=2", "train.unroll_growth=0.9")
    plan = make_plan(load_recipe(str(recipe_file), [*MEDUSA, *growing]))
    assert plan.corpus is not None and plan.work is not None
    batches = plan.corpus.batches
    epochs = batches.total_steps / batches.steps_per_epoch
    assert plan.work.unrolled == round(int(batches.counts.sum()) * epochs)


@pytest.mark.slow
def test_the_plan_refuses_another_kind_of_head_to_start_from(
    recipe_file: Path, tmp_path: Path, target: Target
) -> None:
    MedusaHead.for_target(target, num_heads=K).float().save(tmp_path / "three")
    start = f"head.init_from={tmp_path / 'three'}"
    with pytest.raises(HeadsmithError, match="of kind medusa and head.kind is eagle3"):
        make_plan(load_recipe(str(recipe_file), [start]))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["head.taps=[1, 2]"], "head.taps means nothing for head.kind medusa; leave it out"),
        (["head.norm_output=true"], "head.norm_output means nothing for head.kind medusa"),
        (["train.loss=lk"], "train.loss means nothing for head.kind medusa; set head.loss"),
        (["train.kl_scale=2"], "train.kl_scale means nothing for head.kind medusa"),
        (["head.draft_vocab_size=64"], "means nothing for head.lm_head shared, which drafts every"),
        (["head.lm_head=truncated"], "truncated needs head.draft_vocab_size"),
        (["head.ce_weight=0.2"], "head.ce_weight is the share of ce in head.loss mix"),
        (["head.num_heads=0"], "head.num_heads is 0, but must be greater"),
        (["head.kind=eagle3"], "head.num_heads means nothing for head.kind eagle3; leave it out"),
        (["head.kind=eagle3", "head.num_heads=5", "head.loss=ce"], "eagle3; set train.loss"),
        (["head.kind=medusa2"], "head.kind is \"medusa2\", but must be 'eagle3'"),
    ],
)
def test_keys_that_mean_nothing_are_refused(
    recipe_file: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(HeadsmithError) as caught:
        load_recipe(str(recipe_file), [*MEDUSA, *overrides])
    text = str(caught.value)
    assert said in text and "\n" not in text
    assert text.startswith((f"{recipe_file}: ", "command line: "))


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("chain:4", "validation.draft: chain:4 goes 4 drafts deep and head.num_heads is 3"),
        ("tree:8,2,3", "tree:8,2,3 cannot be drafted by a head of kind medusa in training; take a"),
        ("stored", "validation.draft: stored cannot be drafted by a head of kind medusa"),
        ("medusa:8", "validation.draft: medusa:8 cannot be drafted by a head of kind medusa"),
    ],
)
def test_a_draft_that_the_heads_cannot_make_is_refused_before_training(
    draft: str, said: str, recipe_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(HeadsmithError) as caught:
        train(load_recipe(str(recipe_file), [*MEDUSA, f"validation.draft={draft}"]))
    assert said in str(caught.value) and not (tmp_path / "out").exists()


def test_a_recipe_written_out_in_full_is_read_again(recipe_file: Path) -> None:
    for overrides in ((), MEDUSA):
        recipe = load_recipe(str(recipe_file), overrides)
        assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_the_loss_comes_from_the_section_of_the_kind(recipe_file: Path) -> None:
    eagle = load_recipe(str(recipe_file), ["train.loss=lk", "train.kl_decay=2"])
    assert loss_settings(eagle) == LossSettings("lk", kl_decay=2)
    mixed = load_recipe(str(recipe_file), [*MEDUSA, "head.loss=mix", "head.ce_weight=0.25"])
    assert loss_settings(mixed) == LossSettings("mix", ce_weight=0.25)


def test_the_quickstart_recipes_differ_in_the_head_and_the_folder() -> None:
    eagle, medusa_ = (load_recipe(f"quickstart/{name}") for name in ("eagle3", "medusa"))
    assert medusa_.head.kind == "medusa" and medusa_.output.dir != eagle.output.dir
    exclude = {"head", "output"}
    assert medusa_.model_dump(exclude=exclude) == eagle.model_dump(exclude=exclude)


@pytest.mark.slow
def test_starting_from_another_kind_of_head_is_refused(
    recipe_file: Path, tmp_path: Path, target: Target
) -> None:
    MedusaHead.for_target(target, num_heads=K).float().save(tmp_path / "three")
    given = ["validation.holdout=0", f"head.init_from={tmp_path / 'three'}"]
    with pytest.raises(HeadsmithError, match="of kind medusa and head.kind is eagle3"):
        train(load_recipe(str(recipe_file), given))
    with pytest.raises(HeadsmithError, match="holds 3 Medusa heads and head.num_heads is 4"):
        train(load_recipe(str(recipe_file), [*MEDUSA, "head.num_heads=4", *given]))
