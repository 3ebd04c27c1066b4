"""A head is refused for a target that is not its own, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from headsmith.errors import HeadsmithError
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.provenance import check_pair, read_provenance, target_info
from headsmith.models.target import Target


@pytest.fixture
def head(target: Target, tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    Eagle3Head.for_target(target, torch.arange(0, 300, 10)).save(folder)
    (folder / "headsmith.json").write_text(json.dumps({"target": target_info(target)}))
    return folder


def change_target(head: Path, **changes: Any) -> None:
    about = json.loads((head / "headsmith.json").read_text())
    about["target"] |= changes
    (head / "headsmith.json").write_text(json.dumps(about))


def refused(target: Target, head: Path, words: str) -> None:
    """Refused in one sentence, and a warning of the same words where mismatch is allowed."""
    with pytest.raises(HeadsmithError, match=words) as caught:
        check_pair(target, head)
    assert "--allow-mismatch" in str(caught.value) and "\n" not in str(caught.value)
    warnings = check_pair(target, head, allow_mismatch=True)
    assert len(warnings) == 1 and str(caught.value).startswith(warnings[0])


def test_its_own_target(target: Target, head: Path) -> None:
    assert check_pair(target, head) == []
    assert check_pair(target, str(head)) == []


def test_a_head_that_others_made_is_taken_at_its_word(target: Target, head: Path) -> None:
    (head / "headsmith.json").unlink()
    assert read_provenance(head) is None
    assert check_pair(target, head) == []


def test_provenance_names_the_target(target: Target) -> None:
    info = target_info(target)
    assert info["fingerprint"] == target.fingerprint() and info["path"] == target.path
    assert (info["hidden_size"], info["vocab_size"], info["num_layers"]) == (64, 300, 8)
    assert info["tokenizer"].startswith("sha256:") and info["tokenizer"] != info["fingerprint"]


@pytest.mark.parametrize("allow", [False, True])
def test_another_width_is_never_allowed(
    allow: bool,
    head: Path,
    write_target: Callable[..., Path],
    make_model: Callable[..., PreTrainedModel],
) -> None:
    narrow = Target.load(write_target(make_model("llama", vocab_size=300)))
    with pytest.raises(HeadsmithError, match="states of width 64, the target .* has 32"):
        check_pair(narrow, head, allow_mismatch=allow)


def test_another_vocabulary(target: Target, head: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"vocab_size": 301}))
    refused(target, head, "vocabulary of 301 ids, the target .* has 300")


def test_another_tokenizer(target: Target, head: Path) -> None:
    change_target(head, fingerprint="sha256:1", tokenizer="sha256:2")
    refused(target, head, "another tokenizer; give")
    change_target(head, chat_template="sha256:3")
    refused(target, head, "another chat template; give")


def test_a_record_without_the_template_tells_less(target: Target, head: Path) -> None:
    about = json.loads((head / "headsmith.json").read_text())
    about["target"] |= {"fingerprint": "sha256:1", "tokenizer": "sha256:2"}
    del about["target"]["chat_template"]
    (head / "headsmith.json").write_text(json.dumps(about))
    refused(target, head, "another tokenizer or chat template; give")


def test_a_post_trained_successor_is_named(target: Target, head: Path) -> None:
    nearly = [1.01 * value for value in target_info(target)["sketch"]]
    change_target(head, fingerprint="sha256:1", sketch=nearly)
    refused(target, head, "other weights or another config, as a post-trained successor of it has")
    change_target(head, sketch=nearly[::-1])
    refused(target, head, "other weights or another config; give")


def test_another_revision(target: Target, head: Path) -> None:
    change_target(head, fingerprint="sha256:1", revision="v2")
    refused(target, head, "revision v2 where this is None")


def test_other_weights(target: Target, head: Path) -> None:
    change_target(head, fingerprint="sha256:1", path="ORG/OTHER")
    refused(target, head, "trained for ORG/OTHER.*: other weights or another config")


def test_the_speculators_layout_is_checked_as_well(target: Target, head: Path) -> None:
    (head / "headsmith.json").unlink()
    body = json.loads((head / "config.json").read_text())
    outer = {"speculators_model_type": "eagle3", "transformer_layer_config": body}
    (head / "config.json").write_text(json.dumps(outer))
    assert check_pair(target, head) == []
    (head / "config.json").write_text(json.dumps(outer | {"target_hidden_size": 128}))
    with pytest.raises(HeadsmithError, match="states of width 128"):
        check_pair(target, head)


def test_folders_that_are_no_head(target: Target, head: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadsmithError, match="does not exist"):
        check_pair(target, tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HeadsmithError, match="there is no config.json"):
        check_pair(target, tmp_path / "empty")
    (head / "headsmith.json").write_text('{"target"')
    with pytest.raises(HeadsmithError, match="headsmith.json is not valid JSON"):
        check_pair(target, head)
    (head / "config.json").write_text("{")
    with pytest.raises(HeadsmithError, match="config.json is not valid JSON"):
        check_pair(target, head)
