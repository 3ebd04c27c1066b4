"""Paths and files that are no target: one sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from headsmith.errors import HeadsmithError
from headsmith.models import loading
from headsmith.models.target import Target


@pytest.fixture
def folder(write_target: Callable[..., Path], make_model: Callable[..., PreTrainedModel]) -> Path:
    return write_target(make_model("llama"))


def refused(path: str | Path, words: str) -> None:
    with pytest.raises(HeadsmithError, match=words) as caught:
        Target.load(path)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600


@pytest.mark.parametrize("path", ["/no/such/place", "./nowhere", "nowhere", "a/b/c", "~/nowhere"])
def test_a_path_that_is_not_there(path: str) -> None:
    refused(path, "does not exist; give a folder")


def test_a_hub_id_that_cannot_be_had() -> None:
    refused("headsmith-tests/no-such-model", "could not be loaded")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    refused(path, "is a file but no GGUF")


def test_a_gguf_of_other_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all")
    refused(path, "could not be loaded")


def test_a_folder_without_config(tmp_path: Path) -> None:
    refused(tmp_path, "holds no config.json")


def test_a_config_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused(folder, "could not be loaded")


def test_an_architecture_that_is_not_known(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nothing-known"}))
    refused(folder, "could not be loaded")


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "could not be loaded")


@pytest.mark.parametrize("kept", [0, 5, 100, 50_000])
def test_weights_that_are_cut_off(folder: Path, kept: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    refused(folder, "could not be loaded")


def test_weights_that_lack_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "lacks 1 tensors, the first model.layers.2.mlp.up_proj.weight")


def test_weights_of_another_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    refused(folder, "could not be loaded")


def test_a_folder_without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    refused(folder, "could not be loaded|no tokenizer")
    with pytest.raises(HeadsmithError, match="holds no tokenizer"):
        loading.load_tokenizer(str(folder))
