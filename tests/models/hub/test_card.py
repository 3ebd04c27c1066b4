"""What a card says: the numbers of the files that it was made from, how they were measured, and
nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from headsmith.cli import cli, run
from headsmith.errors import HeadsmithError
from headsmith.models.formats.engine_options import Shape
from headsmith.models.hub.client import Repo, is_repo, parse_repo
from headsmith.models.hub.launch import shape_of, snippets
from headsmith.models.hub.release import Release, ReleaseSettings, prepare
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target

Make = Callable[..., Release]


@pytest.fixture
def make(head: Path, tmp_path: Path) -> Make:
    """make(folder=head, **settings): the release of a head."""

    def release(folder: Path = head, cautions: tuple[str, ...] = (), **settings: Any) -> Release:
        given: dict[str, Any] = {"repo": Repo("ORG/smith"), "target": "ORG/target"} | settings
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        return prepare(folder, ReleaseSettings(**given), list(cautions), work)

    return release


def rows(card: str, first: str) -> list[list[str]]:
    """Cells of the table whose header begins with `first`."""
    lines = card.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.replace("\\|", "!").strip("|").split("|")])
    assert len({len(row) for row in table}) == 1
    return [table[0], *table[2:]]


def test_front_matter(make: Make, result: Path) -> None:
    card = ModelCard(make(results=[result], license="apache-2.0").card)
    data = card.data.to_dict()
    assert (data["base_model"], data["library_name"]) == ("ORG/target", "headsmith")
    assert data["license"] == "apache-2.0" and data["pipeline_tag"] == "text-generation"
    assert {"speculative-decoding", "eagle3"} <= set(data["tags"])
    (model,) = data["model-index"]
    assert model["name"] == "smith"
    found = {one["dataset"]["name"]: one["metrics"] for one in model["results"]}
    assert found.keys() == {"all together", "gsm8k", "mt_bench", "gsm8k + mt_bench"} | {
        "validation in training"
    }
    tau, rate = found["mt_bench"]
    assert (tau["type"], tau["value"]) == ("acceptance_length", 2.5)
    assert (rate["type"], rate["value"]) == ("acceptance_rate", 0.3125)
    assert tau["args"]["draft"] == "tree:12,3,4" and tau["args"]["date"] == "2026-11-30"
    (speed,) = found["gsm8k + mt_bench"]
    assert (speed["type"], speed["value"], speed["args"]["batch"]) == ("speedup", 1.5, 1)


def test_each_number_says_how_it_was_measured(make: Make, result: Path) -> None:
    card = make(results=[result]).card
    header, together, gsm8k, _, validation = rows(card, "On")
    said = dict(zip(header, gsm8k, strict=True))
    assert said == {
        "On": "gsm8k",
        "Tokens a pass": "2.250 [2.00, 2.50]",
        "Acceptance rate": "0.312",
        "Prompts": "12",
        "Draft": "tree:12,3,4",
        "Temperature": "0.7 (sample)",
        "Chat template": "the target's (sha256 c0ffeec0ffee)",
        "Hardware": "Some CPU ! 3 GHz, 2 threads",
        "Dtype": "bfloat16",
        "Date": "2026-11-30",
        "Answer limit": "128",
    }
    assert together[1] == "2.375 [2.00, 2.50]"
    said = dict(zip(header, validation, strict=True))
    assert (said["Tokens a pass"], said["Draft"]) == ("1.500 [1.25, 1.75]", "chain:4")
    assert said["Hardware"] == said["Date"] == "not recorded"
    assert "600 output tokens were checked against the target: 599 its own choice, 1" in card


def test_nothing_is_invented(make: Make, head: Path) -> None:
    (head / "headsmith.json").unlink()
    card = make().card
    assert "Nothing of this head was measured" in card and "The depth below is a guess" in card
    assert "model-index" not in card and "license:" not in card
    assert "No licence was named" in card
    assert "What it was trained on was not recorded." in card
    assert "What it was trained on" not in make(data="Our own talk.").card


def test_no_folder_of_this_machine_is_published(make: Make, result: Path, head: Path) -> None:
    release = make(results=[result], cautions=(f"head {head} is {head.parent}/x, /etc/y and a/b",))
    for text in (release.card, release.files["headsmith.json"].read_text()):
        assert str(head) not in text and "/home" not in text and "/data/" not in text
    assert "- Head ORG/smith is x, y and a/b" in release.card
    assert "- Head ORG/smith was seen in x; mind it" in release.card
    about = json.loads(release.files["headsmith.json"].read_text())
    assert about["target"]["path"] == about["recipe"]["target"]["path"] == "ORG/target"
    assert about["data"]["source"] == "talk.jsonl" and "output" not in about["recipe"]
    assert about["validation"]["tau"] == 1.5


def test_a_result_of_another_head_is_refused(make: Make, result: Path, tmp_path: Path) -> None:
    other = json.loads(result.read_text())
    cases = {
        "whose weights are not these": other | {"head": {"path": "x", "sha256": "0"}},
        "measured no head": other | {"head": None},
        "is not the result of headsmith eval": {"schema": "headsmith.run/1"},
    }
    for words, content in cases.items():
        (tmp_path / "r.json").write_text(json.dumps(content))
        with pytest.raises(HeadsmithError, match=words):
            make(results=[tmp_path / "r.json"])
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(HeadsmithError, match="is not valid JSON"):
        make(results=[tmp_path / "r.json"])
    with pytest.raises(HeadsmithError, match="there is no result"):
        make(results=[tmp_path / "gone.json"])


def test_the_target_must_have_a_name_on_the_hub(make: Make) -> None:
    with pytest.raises(HeadsmithError, match="no name on the Hub; say .* with --base-model"):
        make(target=None)


def test_a_pickle_becomes_safetensors(make: Make, head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    torch.save(tensors, head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    files = make().files
    assert "pytorch_model.bin" not in files
    stored = load_file(files["model.safetensors"])
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_medusa(make: Make, target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "medusa"
    MedusaHead.for_target(target, num_heads=3).save(folder)
    (folder / "medusa_tree.json").write_text("{}")
    release = make(folder)
    assert "medusa_tree.json" in release.files
    assert "SGLang does not know Medusa heads." in release.card
    assert '"method": "medusa"' in release.card and '"num_speculative_tokens": 3' in release.card
    assert "Medusa heads read the last state" in release.card


@pytest.mark.parametrize(
    ("draft", "most", "shape"),
    [
        ("chain:5", None, Shape.chain(5)),
        ("chain:5", 3, Shape.chain(3)),
        ("tree:12,3,4", None, Shape(4, 3, 12)),
        ("stored", 3, Shape.chain(3)),
        (None, None, Shape.chain(3)),
    ],
)
def test_shapes(draft: str | None, most: int | None, shape: Shape) -> None:
    assert shape_of(draft, most) == shape


def test_snippets_draft_as_it_was_measured() -> None:
    vllm, sglang, own = snippets({}, "ORG/smith", "v2", "ORG/target", "tree:12,3,4")
    options = json.loads(vllm.text.partition("--speculative-config ")[2].strip("'"))
    assert options == {
        "method": "eagle3",
        "model": "ORG/smith",
        "revision": "v2",
        "num_speculative_tokens": 4,
        "draft_tensor_parallel_size": 1,
    }
    flags = " ".join(sglang.text.replace("\\\n", "").split())
    assert "--speculative-num-steps 4 --speculative-eagle-topk 3" in flags
    assert flags.endswith("--speculative-num-draft-tokens 13")
    assert own.text.endswith("--head ORG/smith@v2 --draft tree:12,3,4")
    for config in ({"norm_before_residual": True}, {"speculators_model_type": "eagle3"}):
        assert snippets(config, "a/b", None, "c/d", None)[1].text == ""


def test_names_of_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_repo("ORG/a.b-c@v1") == Repo("ORG/a.b-c", "v1")
    assert str(Repo("a/b")) == "a/b" and str(Repo("a/b", "c")) == "a/b@c"
    for text in ("a", "a/b/c", "/a/b", "./a/b", "a/b@", "~/a", "a/b c"):
        assert parse_repo(text) is None
    monkeypatch.chdir(tmp_path)
    assert is_repo("runs/best")
    (tmp_path / "runs" / "best").mkdir(parents=True)
    assert not is_repo("runs/best")


def test_dry_run_shows_the_card_and_sends_nothing(
    head: Path, result: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    args = ["push", str(head), "--repo", "ORG/smith@v2", "--base-model", "ORG/target", "--dry-run"]
    assert run(cli, [*args, "--result", str(result)]) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out.split("---\n")[1])["base_model"] == "ORG/target"
    assert "model.safetensors" in said.err and "trainer.state" not in said.err
    assert "nothing was sent to ORG/smith@v2" in said.err


def test_a_broken_head_is_not_published(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    args = ["push", str(head), "--repo", "ORG/smith", "--base-model", "ORG/target", "--dry-run"]
    assert run(cli, args) == 2
    assert "tie_word_embeddings" in capsys.readouterr().err
    assert run(cli, [*args, "--allow-mismatch"]) == 0
    said = capsys.readouterr()
    assert "warning: head" in said.err and "Mind:\n\n- Head ORG/smith: config.json" in said.out
