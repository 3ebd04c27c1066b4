"""Features that are captured once: trained on to the same losses, checked, and refused when they
are not the recipe's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headsmith.cli import cli, run
from headsmith.data.feature_store import Store
from headsmith.errors import HeadsmithError
from headsmith.models.target import Target
from headsmith.train.capture import capture
from headsmith.train.corpus import load_corpus
from headsmith.train.features import Computed
from headsmith.train.loop import train
from headsmith.train.recipe import Recipe, load_recipe
from headsmith.train.unroll import prepare_row

QUICK = ("train.max_steps=4", "validation.holdout=0", "data.max_rows=16")
KINDS = {
    "eagle3": (),
    "eagle3.1": ("head.kind=eagle3.1",),
    "medusa": ("head.kind=medusa", "head.num_heads=3", "head.draft_vocab_size=null"),
}


def changed(recipe_file: Path, *overrides: str) -> Recipe:
    return load_recipe(str(recipe_file), [*QUICK, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_float32_features_train_to_the_same_bits(
    recipe_file: Path, tmp_path: Path, metrics: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(changed(recipe_file, *KINDS[kind], f"output.dir={tmp_path / 'computed'}"))
    capture(changed(recipe_file, *KINDS[kind]), tmp_path / "store", "float32", 1)

    def fails(*_: object, **__: object) -> None:
        raise AssertionError("the target runs")

    monkeypatch.setattr(Target, "features", fails)
    stored = (f"data.features={tmp_path / 'store'}", f"output.dir={tmp_path / 'stored'}")
    train(changed(recipe_file, *KINDS[kind], *stored))
    assert metrics(tmp_path / "stored") == metrics(tmp_path / "computed")
    assert len(metrics(tmp_path / "stored")) == 4
    weights = [tmp_path / name / "latest" / "model.safetensors" for name in ("stored", "computed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.01), ("fp8", 0.05)])
def test_rounded_features_train_to_nearly_the_same(
    recipe_file: Path, tmp_path: Path, metrics: Any, dtype: Any, bound: float
) -> None:
    train(changed(recipe_file, f"output.dir={tmp_path / 'computed'}"))
    capture(changed(recipe_file), tmp_path / "store", dtype, 1)
    stored = (f"data.features={tmp_path / 'store'}", f"output.dir={tmp_path / 'stored'}")
    train(changed(recipe_file, *stored))
    pairs = zip(metrics(tmp_path / "stored"), metrics(tmp_path / "computed"), strict=True)
    for found, own in pairs:
        assert 0 < abs(found["loss"] - own["loss"]) < bound * own["loss"]


@pytest.mark.slow
def test_one_store_serves_other_heads_and_settings(
    recipe_file: Path, tmp_path: Path, metrics: Any
) -> None:
    """Another seed, unroll or kind of head reads the same packed rows."""
    capture(changed(recipe_file), tmp_path / "store", "float32", 1)
    others = [("train.seed=5", "train.unroll_steps=2", "head.taps=[2,5]"), KINDS["medusa"]]
    for number, other in enumerate(others):
        out, again = tmp_path / f"a{number}", tmp_path / f"b{number}"
        train(changed(recipe_file, *other, f"output.dir={out}"))
        features = f"data.features={tmp_path / 'store'}"
        train(changed(recipe_file, *other, features, f"output.dir={again}"))
        assert metrics(again) == metrics(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("data.max_rows=15",), "the fingerprint of the prepared data is"),
        (("data.row_tokens=200",), "data.row_tokens is 256 there and 200 here"),
        (("head.taps=[2,3,5]",), "the head reads tap 3 and the taps there are [2, 4, 5]"),
    ],
)
def test_features_of_another_recipe_are_refused(
    recipe_file: Path, tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    capture(changed(recipe_file), tmp_path / "store", "bfloat16", 256)
    with pytest.raises(HeadsmithError) as caught:
        train(changed(recipe_file, f"data.features={tmp_path / 'store'}", *overrides))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_features_of_another_target_are_refused(
    recipe_file: Path, tmp_path: Path, target_dir: Path
) -> None:
    capture(changed(recipe_file), tmp_path / "store", "bfloat16", 256)
    other = tmp_path / "other"
    Target.load(target_dir).tokenizer.save_pretrained(other)
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    model.get_input_embeddings().weight.data[5] += 1
    model.save_pretrained(other)
    features = f"data.features={tmp_path / 'store'}"
    with pytest.raises(HeadsmithError, match="the target's fingerprint is sha256:"):
        train(changed(recipe_file, features, f"target.path={other}"))


def test_a_folder_without_features(recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadsmithError, match="holds no features"):
        train(changed(recipe_file, f"data.features={tmp_path / 'nothing'}"))


@pytest.mark.slow
def test_the_command_captures_checks_and_finds_damage(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "store"
    type_in = [*QUICK, "--out", str(out), "--dtype", "fp8"]
    assert run(cli, ["data", "capture", str(recipe_file), *type_in]) == 0
    said = capsys.readouterr().err
    assert "bytes a token (fp8)" in said and f"data.features={out}" in said
    assert run(cli, ["data", "capture", "--check", str(out)]) == 0
    assert "all as they were written" in capsys.readouterr().err
    file = Store.open(out).file(0)
    damaged = bytearray(file.read_bytes())
    damaged[-3] ^= 16
    file.write_bytes(damaged)
    assert run(cli, ["data", "capture", "--check", str(out)]) == 2
    said = capsys.readouterr().err
    assert "shard-00000.safetensors: row-" in said and "is damaged (bytes" in said
    code = run(cli, ["data", "capture", str(recipe_file), *type_in[:-2], "--dtype", "bfloat16"])
    assert code == 2
    assert "the dtype is fp8 there and bfloat16 here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [(), ("x.yaml",), ("--out", "d"), ("x.yaml", "--check", "d")], ids=" ".join
)
def test_usage(arguments: tuple[str, ...]) -> None:
    assert run(cli, ["data", "capture", *arguments]) == 2


def test_what_is_stored_is_what_training_prepares(recipe_file: Path, tmp_path: Path) -> None:
    recipe = changed(recipe_file)
    store = capture(recipe, tmp_path / "store", "float32", 256)
    target = Target.load(recipe.target.path)
    batches = load_corpus(recipe, target.tokenizer).batches
    for row in range(len(batches.documents)):
        own = prepare_row(target, torch.arange(64), batches.row(row), (2, 4, 5), 3, batches.shared)
        found = store.read(row)
        assert torch.equal(found["taps"], own.taps) and torch.equal(found["last"], own.last)
        assert len(own.last) < len(own.ids), "prompts have no last state"
        computed = Computed(target, batches, (2, 4, 5)).states(row)
        assert torch.equal(computed.logsumexp, found["logsumexp"])
