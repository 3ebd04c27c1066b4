"""The vllm backend without vLLM: what is asked of the other process, what is made of its answers,
and what is said when it fails. With vLLM itself: tests/real/test_capture_vllm.py.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headsmith.cli import cli, run
from headsmith.data.feature_codec import decode
from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.models.target import Target
from headsmith.train.capture import Backend, capture
from headsmith.train.loop import train
from headsmith.train.recipe import Recipe, load_recipe

QUICK = ("train.max_steps=3", "validation.holdout=0", "data.max_rows=8", "data.row_tokens=128")

# Speaks for vllm_worker.py: the residual stream of each document alone, by transformers.
STUB = """#!{python}
import json, os, sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
answers = os.fdopen(int(sys.argv[2]), "w")
def answer(found):
    print(json.dumps(found), file=answers, flush=True)
settings = json.loads(sys.stdin.readline())
os.makedirs(settings["folder"])
model = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=settings["dtype"])
seen = {{}}
model.model.norm.register_forward_pre_hook(lambda module, args: seen.update(last=args[0][0]))
answer("ready")
for turn, line in enumerate(sys.stdin):
    files = []
    for ids in json.loads(line):
        assert len(ids) <= settings["longest"] - 1
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        stream = [*(state[0] for state in states[:-1]), seen["last"]]
        files.append(os.path.join(settings["folder"], f"{{turn}}-{{len(files)}}"))
        kept = torch.stack([stream[layer] for layer in settings["layers"]], 1)
        save_file({{"hidden_states": kept, "token_ids": torch.tensor(ids) + {wrong}}}, files[-1])
    answer(files)
"""


def stub(tmp_path: Path, wrong: int = 0) -> Backend:
    path = tmp_path / "python-with-vllm"
    path.write_text(STUB.format(python=sys.executable, wrong=wrong))
    path.chmod(0o755)
    return Backend("vllm", str(path))


def changed(recipe_file: Path, *overrides: str) -> Recipe:
    return load_recipe(str(recipe_file), [*QUICK, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [("head.taps=[1,4,8]",), ("head.kind=medusa",)], ids=" ".join)
def test_its_states_are_those_of_transformers(
    recipe_file: Path, tmp_path: Path, metrics: Any, kind: tuple[str, ...]
) -> None:
    kind = (*kind, "head.draft_vocab_size=null")
    recipe = changed(recipe_file, *kind)
    own = capture(recipe, tmp_path / "own", "float32", 256)
    theirs = capture(recipe, tmp_path / "theirs", "float32", 256, stub(tmp_path))
    places = list(range(len(own.about["taps"])))
    for row in own.shard_of:
        some, others = (
            decode(store.read(row), places, torch.float32, "cpu") for store in (own, theirs)
        )
        torch.testing.assert_close(others.taps, some.taps, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(others.last, some.last, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(others.logsumexp, some.logsumexp, rtol=1e-4, atol=2e-5)
        assert torch.equal(others.choice, some.choice)
    for name in ("own", "theirs"):
        where = (f"data.features={tmp_path / name}", f"output.dir={tmp_path / name}-run")
        train(changed(recipe_file, *kind, *where))
    losses = [[line["loss"] for line in metrics(tmp_path / f"{n}-run")] for n in ("own", "theirs")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and len(losses[0]) == 3
    with pytest.raises(HeadsmithError, match="is transformers, float32 there and vllm, float32"):
        capture(recipe, tmp_path / "own", "float32", 256, stub(tmp_path))


def test_states_of_other_tokens_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadsmithError, match="of other tokens"):
        capture(changed(recipe_file), tmp_path / "s", "bfloat16", 256, stub(tmp_path, wrong=1))
    assert not list((tmp_path / "s").glob("shard-*"))


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nowhere/python", "/nowhere/python does not start (No such file or directory)"),
        ("false", "vLLM ended with code 1 while it computed states: it said nothing"),
        (sys.executable, "ModuleNotFoundError: No module named 'vllm'"),
    ],
)
def test_a_worker_that_does_not_come_up(
    recipe_file: Path, tmp_path: Path, python: str, said: str
) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        capture(changed(recipe_file), tmp_path / "s", "bfloat16", 256, Backend("vllm", python))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_asks_for_it(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(recipe_file), *QUICK, "--out", str(tmp_path / "s"), "--backend", "vllm"]
    assert run(cli, ["data", "capture", *arguments, "--vllm-python", "/nowhere/python"]) == 4
    assert "give the Python of an environment with vLLM" in capsys.readouterr().err


def test_the_target_is_not_loaded_whole(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Target) -> None:
        raise AssertionError("blocks are loaded")

    monkeypatch.setattr(Target, "check", fails)
    capture(changed(recipe_file), tmp_path / "store", "bfloat16", 256, stub(tmp_path))
    train(changed(recipe_file, f"data.features={tmp_path / 'store'}"))
    with pytest.raises(AssertionError, match="blocks are loaded"):
        capture(changed(recipe_file), tmp_path / "other", "bfloat16", 256)
