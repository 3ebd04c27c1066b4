"""A recipe that names the sizes of its head: trained, validated, saved, continued."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headsmith.errors import HeadsmithError
from headsmith.train.loop import train
from headsmith.train.plan import make_plan
from headsmith.train.recipe import Recipe, load_recipe

SIZES = ("head.hidden_size=32", "head.num_attention_heads=4")


@pytest.fixture
def narrow(recipe_file: Path) -> Callable[..., Recipe]:
    def make(*overrides: str) -> Recipe:
        return load_recipe(str(recipe_file), [*SIZES, "train.max_steps=6", *overrides])

    return make


@pytest.mark.slow
def test_a_narrow_head_is_trained_and_keeps_its_table(
    narrow: Callable[..., Recipe], metrics: Callable[..., list[dict[str, Any]]]
) -> None:
    recipe = narrow("output.save_every=3")
    folder = train(recipe)
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["target_hidden_size"]) == (32, 64)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    out = Path(recipe.output.dir)
    checkpoints = sorted(p for p in out.rglob("model.safetensors") if not p.parent.is_symlink())
    tables = [load_file(path)["embed_tokens.weight"] for path in checkpoints]
    assert len(tables) >= 2 and tables[0].shape == (300, 32)
    assert all(torch.equal(table, tables[0]) for table in tables)
    losses = [line["loss"] for line in metrics(out)]
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_its_plan_counts_the_table(narrow: Callable[..., Recipe], recipe_file: Path) -> None:
    plan, whole = make_plan(narrow()), make_plan(load_recipe(str(recipe_file)))
    assert plan.head_trained < whole.head_trained
    name = "head, gradients, AdamW"
    assert plan.memory[name] == 16 * plan.head_trained + 4 * 300 * 32


def test_sizes_beside_a_given_head_are_refused(narrow: Callable[..., Recipe]) -> None:
    with pytest.raises(HeadsmithError, match="head: .*leave out hidden_size, num_attention_heads"):
        narrow("head.init_from=somewhere")
