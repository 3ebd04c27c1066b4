"""Recipes: defaults, overrides, and one sentence for each mistake."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from headsmith.errors import HeadsmithError
from headsmith.models.eagle3_config import FLAGS, KINDS, Eagle3Config
from headsmith.train.recipe import HeadSection, Recipe, load_recipe, locate, recipe_path

MINIMAL = "target: {path: some/model}\ndata: {source: some/data}\n"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


def sentence(path: Path, *overrides: str) -> str:
    with pytest.raises(HeadsmithError) as caught:
        load_recipe(str(path), overrides)
    text = str(caught.value)
    assert "\n" not in text and caught.value.exit_code == 2
    return text


def test_left_out_keys_have_the_defaults_of_the_classes(recipe_file: Path) -> None:
    recipe = load_recipe(str(recipe_file))
    given = {"target": {"path": "some/model"}, "data": {"source": "some/data"}}
    assert recipe == Recipe.model_validate(given)
    assert recipe.train.betas == (0.9, 0.95) and recipe.head.taps is None


def test_overrides_are_yaml_and_may_open_a_section(recipe_file: Path) -> None:
    recipe = load_recipe(
        str(recipe_file),
        ["train.learning_rate=3e-4", "head.taps=[2, 5, 7]", "data.max_rows=null", "output.dir=a=b"],
    )
    assert recipe.train.learning_rate == 3e-4
    assert recipe.head.taps == [2, 5, 7]
    assert recipe.data.max_rows is None
    assert recipe.output.dir == "a=b"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.epoch=2", "command line: unknown key train.epoch; did you mean train.epochs?"),
        ("data.lr=2", "command line: unknown key data.lr; "),
        ("train.source=x", "did you mean data.source?"),
        ("trian.epochs=2", "unknown key trian; did you mean train?"),
        ("train.loss=mse", "train.loss is \"mse\", but must be 'kl' or 'lk'"),
        ("train.epochs=0", "train.epochs is 0, but must be greater than or equal to 1"),
        ("train.epochs=many", 'train.epochs is "many", but must be a valid integer'),
        ("train.learning_rate=.nan", "train.learning_rate is NaN, but must be a finite number"),
        ("train.epochs", "override 'train.epochs' is not of the form key.sub=value"),
        ("=3", "not of the form"),
        ("train..epochs=3", "not of the form"),
        ("data.source.x=3", "source is a value, not a section"),
        ("train.betas=[0.9", "is not YAML"),
        ("data.row_tokens=100", "row_tokens (100) is below max_length (2048)"),
        ("data=null", "data is null"),
        ("head.kind=eagle4", 'head.kind is "eagle4", but must be '),
    ],
)
def test_wrong_overrides(recipe_file: Path, override: str, said: str) -> None:
    assert said in sentence(recipe_file, override)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: {source: x}\n", "target is missing"),
        ("", "is not a recipe"),
        ("- a\n", "is not a recipe"),
        ("target: [\n", "cannot be read as YAML"),
        (MINIMAL + "train: {epochs: 1, epochs: 2}\n", "key 'epochs' is given twice"),
        (MINIMAL + "trane: {}\n", "unknown key trane; did you mean train?"),
        (MINIMAL + "head: {tap: [1]}\n", "unknown key head.tap; did you mean head.taps?"),
    ],
)
def test_wrong_files_are_named(recipe_file: Path, text: str, said: str) -> None:
    recipe_file.write_text(text)
    assert said in sentence(recipe_file)
    assert str(recipe_file) in sentence(recipe_file)


def test_a_recipe_that_is_nowhere(tmp_path: Path) -> None:
    assert "quickstart/eagle3" in sentence(tmp_path / "none.yaml")


def test_packaged_recipes_load_by_name_and_path_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    by_name = recipe_path("quickstart/eagle3")
    assert by_name == recipe_path("recipes/quickstart/eagle3.yaml")
    recipe = load_recipe("quickstart/eagle3")
    assert recipe.data.source.startswith("data/quickstart/")
    assert Path(locate("data/quickstart")).is_absolute()


def test_files_here_come_before_packaged_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "recipes" / "quickstart" / "eagle3.yaml"
    here.parent.mkdir(parents=True)
    here.write_text(MINIMAL)
    assert load_recipe("recipes/quickstart/eagle3.yaml").target.path == "some/model"
    assert locate("org/name") == "org/name"


def test_fingerprint_ignores_where_it_writes_but_not_what_it_trains(recipe_file: Path) -> None:
    def fingerprint(*overrides: str) -> str:
        return load_recipe(str(recipe_file), overrides).fingerprint()

    assert fingerprint() == fingerprint("output.dir=b", "output.keep_checkpoints=5")
    assert fingerprint() == fingerprint("validation.limit=3")
    assert fingerprint() != fingerprint("train.seed=1")
    assert fingerprint() != fingerprint("validation.holdout=0.1")


def test_reading_a_recipe_imports_no_torch() -> None:
    code = (
        "import sys; from headsmith.train.recipe import load_recipe; import headsmith.train.cli; "
        "load_recipe('quickstart/eagle3'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def flags_of(section: HeadSection) -> dict[str, bool]:
    return {flag: getattr(section, flag) for flag in FLAGS if hasattr(section, flag)}


def test_the_class_the_recipe_and_the_command_line_have_the_same_defaults(
    recipe_file: Path,
) -> None:
    """A checkpoint that says nothing, a fresh head, a recipe and an override agree on each flag."""
    by_class = {field.name: field.default for field in dataclasses.fields(Eagle3Config)}
    by_constructor = inspect.signature(Eagle3Config.for_target).parameters
    typed = load_recipe(str(recipe_file), ["head.kind=eagle3"]).head
    for flag in FLAGS:
        assert by_class[flag] is (flag in KINDS["eagle3"]) is False
    for flag, default in flags_of(HeadSection()).items():
        assert default is by_class[flag] is by_constructor[flag].default is getattr(typed, flag)
    assert HeadSection().kind == next(iter(KINDS)) == "eagle3"


def test_a_kind_of_head_is_its_flags(recipe_file: Path) -> None:
    for kind, flags in KINDS.items():
        by_word = load_recipe(str(recipe_file), [f"head.kind={kind}"]).head
        assert flags_of(by_word) == {flag: flag in flags for flag in flags_of(HeadSection())}
    by_hand = ["head.fc_norm=true", "head.norm_output=true"]
    assert flags_of(load_recipe(str(recipe_file), by_hand).head) == flags_of(by_word)
    assert load_recipe(str(recipe_file), by_hand).head.kind == "eagle3"


def test_norms_that_only_others_train_are_no_keys_of_a_recipe(recipe_file: Path) -> None:
    for flag in ("norm_before_fc", "norm_before_residual"):
        assert f"unknown key head.{flag}" in sentence(recipe_file, f"head.{flag}=true")
        assert all(flag not in flags for flags in KINDS.values())


def test_a_kind_whose_flag_is_taken_away(recipe_file: Path) -> None:
    text = sentence(recipe_file, "head.kind=eagle3.1", "head.norm_output=false")
    assert "kind eagle3.1 is the one with norm_output; leave norm_output out" in text


def test_the_two_quickstarts_differ_in_the_head_and_in_where_it_goes() -> None:
    old, new = (load_recipe(f"quickstart/{kind}").model_dump() for kind in KINDS)
    assert [recipe["head"].pop("kind") for recipe in (old, new)] == list(KINDS)
    for flag in KINDS["eagle3.1"]:
        assert (old["head"].pop(flag), new["head"].pop(flag)) == (False, True)
    assert old["output"].pop("dir") != new["output"].pop("dir")
    assert old == new
