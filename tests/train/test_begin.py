"""A run whose head begins as the best linear guess is ahead from its first step on."""

import json
from pathlib import Path
from typing import Any

import pytest

from headsmith.errors import HeadsmithError
from headsmith.train.loop import train
from headsmith.train.plan import make_plan, peak
from headsmith.train.recipe import load_recipe

ONCE = ("train.max_steps=1", "validation.limit=1")


def first_step(recipe_file: Path, folder: Path, *more: str) -> dict[str, Any]:
    train(load_recipe(str(recipe_file), [*ONCE, f"output.dir={folder}", *more]))
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])


def test_a_fitted_head_is_right_more_often(recipe_file: Path, tmp_path: Path) -> None:
    balanced = first_step(recipe_file, tmp_path / "a", "head.init=balanced")
    linear = first_step(recipe_file, tmp_path / "b")
    assert linear["accuracy"][0] > 1.5 * balanced["accuracy"][0]
    assert linear["losses"][0] < balanced["losses"][0]


def test_kept_features_begin_alike(recipe_file: Path, tmp_path: Path) -> None:
    computed = first_step(recipe_file, tmp_path / "a")
    kept = first_step(recipe_file, tmp_path / "b", "data.keep_features=memory")
    assert kept["losses"] == computed["losses"]


def test_a_fit_reads_as_few_rows_as_are_asked_for(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_step(recipe_file, tmp_path / "a", "head.fit_rows=1")
    assert "of 1 packed ones" in capsys.readouterr().err


def test_the_plan_counts_the_fit(recipe_file: Path) -> None:
    def plan(*more: str) -> Any:
        return make_plan(load_recipe(str(recipe_file), more))

    linear, balanced = plan(), plan("head.init=balanced")
    tokens = sum(linear.corpus.batches.tokens)
    assert linear.work.read == balanced.work.read + tokens
    assert plan("data.keep_features=memory").work.read == tokens
    assert set(linear.memory) - set(balanced.memory) == {"linear fit, before all below"}
    assert peak(linear.memory) == peak(balanced.memory) == sum(balanced.memory.values())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["head.init=zero"], "head.init"),
        (["head.fit_rows=0"], "head.fit_rows"),
        (
            ["head.init=balanced", "head.fit_rows=9"],
            "head.fit_rows means nothing for head.init balanced; leave it out",
        ),
        (
            ["head.kind=medusa", "head.draft_vocab_size=null", "head.fit_rows=9"],
            "head.fit_rows means nothing for head.kind medusa; leave it out",
        ),
    ],
)
def test_keys_without_meaning_are_refused(recipe_file: Path, keys: list[str], said: str) -> None:
    with pytest.raises(HeadsmithError) as fault:
        load_recipe(str(recipe_file), keys)
    assert said in str(fault.value) and "\n" not in str(fault.value)
