"""Every shipped recipe, planned from its target's configuration alone: no weights, no tokenizer, no
data, no network.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from headsmith.train.cli import train as command
from headsmith.train.cost import SUSTAINED
from headsmith.train.launch import Launch
from headsmith.train.plan import Plan, make_plan, peak
from headsmith.train.recipe import Recipe, load_recipe

HERE = Path(__file__).parent
ROOM = HERE.parent.parent / "recipes"
RECIPES = sorted(
    str(path.relative_to(ROOM).with_suffix(""))
    for path in ROOM.rglob("*.yaml")
    if path.parent.name != "accelerate"
)
# Of the published checkpoints: a configuration with another number is another model.
PARAMETERS = {
    "deepseek-v2-lite": 15_706_484_224,
    "gemma-3-12b": 12_187_325_040,
    "gpt-oss-20b": 20_914_757_184,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}


def target_of(name: str) -> str:
    folder = name.split("/")[0]
    return "smollm2-135m" if folder == "quickstart" else folder


def text_of(name: str) -> str:
    return (ROOM / f"{name}.yaml").read_text()


def launch_of(name: str) -> Launch:
    """What a recipe whose memory is that of several processes says to launch it with."""
    shares = "accelerate/gpu-8-fsdp2.yaml" in text_of(name)
    return Launch("fsdp2", processes=8, local=8) if shares else Launch()


@pytest.fixture(scope="module")
def recipe_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recipe]:
    """A recipe whose target is a folder with nothing but the configuration."""
    root = tmp_path_factory.mktemp("targets")
    for path in (HERE / "configs").glob("*.json"):
        (root / path.stem).mkdir()
        shutil.copy(path, root / path.stem / "config.json")
    return lambda name: load_recipe(name, [f"target.path={root / target_of(name)}"])


@pytest.fixture(scope="module")
def plans(recipe_for: Callable[[str], Recipe]) -> tuple[dict[str, Plan], float]:
    """The plan of every recipe, and the seconds that all of them took."""
    began = time.monotonic()
    found = {name: make_plan(recipe_for(name), launch_of(name)) for name in RECIPES}
    return found, time.monotonic() - began


def test_all_are_planned_in_under_a_minute(plans: tuple[dict[str, Plan], float]) -> None:
    found, seconds = plans
    assert len(found) >= 27 and seconds < 60


@pytest.mark.parametrize("name", RECIPES)
def test_a_plan_from_the_configuration(
    name: str, plans: tuple[dict[str, Plan], float], recipe_for: Callable[[str], Recipe]
) -> None:
    plan, recipe = plans[0][name], recipe_for(name)
    assert plan.target_parameters == PARAMETERS[target_of(name)]
    assert plan.target_active < plan.target_parameters
    assert plan.corpus is None and plan.work is not None and not plan.work.exact
    assert plan.work.read <= plan.work.tokens
    if recipe.head.draft_vocab_size:
        assert plan.draft_vocab == recipe.head.draft_vocab_size
    else:
        assert recipe.head.kind == "medusa" and plan.draft_vocab > 32_000
    assert plan.operations and all(size > 0 for size in plan.memory.values())


@pytest.mark.parametrize("name", [n for n in RECIPES if not n.startswith("quickstart/")])
def test_the_comment_says_what_the_plan_says(
    name: str, plans: tuple[dict[str, Plan], float]
) -> None:
    plan = plans[0][name]
    comment = " ".join(line[1:].strip() for line in text_of(name).splitlines() if line[:1] == "#")
    said = re.search(r"at most ([\d,]+) tokens and ([\d.]+) GPU-hours", comment)
    assert said and plan.work and plan.operations
    assert int(said[1].replace(",", "")) == plan.work.tokens
    hours = plan.operations / SUSTAINED / 3600
    assert float(said[2]) == pytest.approx(hours, rel=0.06)
    memory = re.search(r"Memory: about (\d+) GB", comment)
    assert memory
    assert int(memory[1]) == pytest.approx(peak(plan.memory) / 1e9, rel=0.05)
    assert "Published tau of similar heads: " in comment
    assert f"headsmith train {name} --plan" in comment


@pytest.mark.parametrize("target", sorted(set(PARAMETERS) - {"smollm2-135m"}))
def test_every_target_has_every_kind_of_head(target: str) -> None:
    kinds = ("eagle3", "eagle3.1", "medusa")
    old, new, medusa = recipes = [load_recipe(f"{target}/{kind}") for kind in kinds]
    assert tuple(recipe.head.kind for recipe in recipes) == kinds
    assert not (old.head.fc_norm or old.head.norm_output)
    for recipe in (new, medusa):
        assert recipe.target == old.target and recipe.data == old.data
    assert len({recipe.output.dir for recipe in recipes}) == len(kinds)


def test_a_target_that_fits_no_gpu_is_in_shares(recipe_for: Callable[[str], Recipe]) -> None:
    """By the plan, each of eight holds an eighth of the blocks, two whole ones and the ends."""
    recipe = recipe_for("llama-3.3-70b/eagle3")
    assert recipe.target.parallel == "sharded"
    alone = make_plan(recipe, Launch()).memory["target"]
    shared = make_plan(recipe, Launch("fsdp2", 8, 8)).memory["target"]
    block = 855_654_400 * 2
    assert alone == 2 * PARAMETERS["llama-3.3-70b"]
    assert shared == pytest.approx(80 * block / 8 + 2 * block + 2 * 2 * 128256 * 8192, rel=1e-3)
    two_machines = make_plan(recipe, Launch("fsdp2", 16, 8)).memory["target"]
    assert two_machines == shared


def test_what_a_configuration_cannot_say_is_said(recipe_for: Callable[[str], Recipe]) -> None:
    path = recipe_for("qwen3-8b/eagle3").target.path

    def plan(*overrides: str) -> str:
        given = ["qwen3-8b/eagle3", f"target.path={path}", *overrides, "--plan"]
        result = CliRunner().invoke(command, given, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    assert "not looked at" in plan() and "at most 655,360,000" in plan()
    assert "unknown" in plan("train.max_steps=null")
    assert "at most 819,200" in plan("train.max_steps=null", "data.max_rows=100")


def test_experts_that_a_token_does_not_visit_are_not_counted(
    plans: tuple[dict[str, Plan], float],
) -> None:
    """Within a tenth of what the makers of the models say, embeddings aside."""
    said = {"qwen3-30b-a3b": 3.3e9, "gpt-oss-20b": 3.6e9, "deepseek-v2-lite": 2.4e9}
    outside = {"qwen3-30b-a3b": 2 * 151936 * 2048, "gpt-oss-20b": 2 * 201088 * 2880}
    outside["deepseek-v2-lite"] = 2 * 102400 * 2048
    for name, active in said.items():
        found = plans[0][f"{name}/eagle3"].target_active + outside[name]
        assert 0.85 * active < found < 1.4 * active, name
