"""What is read of a target without loading it, and what a head is told by it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from headsmith.errors import HeadsmithError
from headsmith.models.doctor.examine import examine, vet
from headsmith.models.doctor.findings import error, note, refuse_errors, warning
from headsmith.models.doctor.target import TargetFacts
from headsmith.models.identity import Identity
from headsmith.models.target import Target


@pytest.fixture
def copied(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """The target's folder, to be changed."""
    return Path(shutil.copytree(tiny_target_dir, tmp_path / "copy"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_same_identity_as_of_the_loaded_target(target: Target, facts: TargetFacts) -> None:
    assert facts.identity == Identity.of(target)
    assert facts.max_context == target.max_context
    assert set(facts.stop_ids) == set(target.always_drafted)


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "gemma3", "mixtral", "phi3"])
def test_of_other_families(
    family: str,
    write_target: Callable[..., Path],
    make_model: Callable[..., PreTrainedModel],
) -> None:
    folder = write_target(make_model(family))
    assert TargetFacts.read(str(folder)).identity == Identity.of(Target.load(folder))


def test_of_a_family_whose_files_have_other_names_than_its_class(
    write_target: Callable[..., Path], make_model: Callable[..., PreTrainedModel]
) -> None:
    folder = write_target(make_model("gpt_neox"))
    own = replace(Identity.of(Target.load(folder)), fingerprint=None, sketch=None)
    assert TargetFacts.read(str(folder)).identity == own


def test_of_a_target_in_shards(
    write_target: Callable[..., Path], make_model: Callable[..., PreTrainedModel]
) -> None:
    folder = write_target(make_model("llama"), max_shard_size="30KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert TargetFacts.read(str(folder)).identity == Identity.of(Target.load(folder))


def test_without_weights_the_rest_is_compared(eagle: Any, copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    facts = TargetFacts.read(str(copied))
    assert facts.identity.fingerprint is None and facts.identity.sketch is None
    found = examine(eagle.folder, facts)
    assert [(one.level, one.check) for one in found] == [("note", "identity")]
    assert "weights were not compared" in found[0].sentence
    eagle.record(target__tokenizer="other")
    assert examine(eagle.folder, facts)[0].sentence.count("another tokenizer") == 1


def test_a_successor_by_its_card(eagle: Any, copied: Path, tiny_target_dir: Path) -> None:
    edit(copied / "tokenizer_config.json", chat_template="{{ messages }}")
    (copied / "chat_template.jinja").write_text("{{ messages }}")
    card = f"---\nlicense: mit\nbase_model:\n- {tiny_target_dir}\n---\n# Tuned\n"
    (copied / "README.md").write_text(card)
    (found, *_) = examine(eagle.folder, TargetFacts.read(str(copied)))
    assert (found.level, found.check) == ("error", "identity")
    assert "another chat template, as a post-trained successor of it has" in found.sentence
    for bad in ("no front matter", "---\n[\n---\n", "---\n- a\n---\n"):
        (copied / "README.md").write_text(bad)
        assert TargetFacts.read(str(copied)).bases == ()


def test_an_fp8_target_is_noted(eagle: Any, facts: TargetFacts) -> None:
    stored = replace(facts, quantization={"quant_method": "fp8", "kv_cache_scheme": None})
    (found,) = examine(eagle.folder, stored)
    assert (found.level, found.check) == ("note", "fp8")
    assert "keep the cache of head" in found.sentence


def test_a_head_that_others_made(eagle: Any, facts: TargetFacts) -> None:
    (eagle.folder / "headsmith.json").unlink()
    eagle.config(rope_theta=5e5, norm_output=False)
    found = examine(eagle.folder, facts)
    assert [(one.level, one.check) for one in found] == [
        ("warning", "rope"),
        ("note", "flags"),
        ("note", "record"),
    ]


def test_folders_that_are_no_head(tmp_path: Path, facts: TargetFacts) -> None:
    for folder, words in ((tmp_path / "gone", "does not exist"), (tmp_path, "no config.json")):
        (found,) = examine(folder, facts)
        assert found.level == "error" and words in found.sentence


def test_targets_that_cannot_be_read(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadsmithError, match="gone does not exist"):
        TargetFacts.read(str(tmp_path / "gone"))
    edit(copied / "config.json", model_type="nonsense")
    with pytest.raises(HeadsmithError, match="config of target .* could not be read"):
        TargetFacts.read(str(copied))


def test_errors_refuse_and_warnings_are_handed_on(eagle: Any, tiny_target_dir: Path) -> None:
    found = [error("a", "one"), error("b", "two"), warning("c", "three"), note("d", "four")]
    with pytest.raises(HeadsmithError, match=r"^one \(and 1 more; headsmith doctor names them\)$"):
        refuse_errors(found)
    assert refuse_errors(found, allow_mismatch=True) == ["one", "two", "three"]
    assert vet(eagle.folder, str(tiny_target_dir)) == []
    eagle.config(max_position_embeddings=64)
    assert len(vet(eagle.folder, str(tiny_target_dir))) == 1
    eagle.config(tie_word_embeddings=True)
    with pytest.raises(HeadsmithError, match="tie_word_embeddings"):
        vet(eagle.folder, str(tiny_target_dir))
