"""Push and pull through the real client, against a Hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headsmith.cli import cli, run
from headsmith.files import weights_sha256

NAME = "ORG/smith"
BASE = "ORG/target"


def push(head: Path, *more: object) -> int:
    args = ["push", head, "--repo", NAME, "--base-model", BASE, *more]
    return run(cli, [str(arg) for arg in args])


def changed(head: Path) -> None:
    """Other weights, with their record."""
    file = head / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"] += 1
    save_file(tensors, file, {"format": "pt"})
    about = json.loads((head / "headsmith.json").read_text())
    about["head"]["sha256"] = weights_sha256(head)
    (head / "headsmith.json").write_text(json.dumps(about))


def test_a_head_is_published_and_read_back(
    hub: Any, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(head) == 0
    assert f"{hub.url}/{NAME} (private), commit" in capsys.readouterr().out
    held = hub.tree(NAME)
    files = {".gitattributes", "README.md", "config.json", "headsmith.json", "model.safetensors"}
    assert held.keys() == files
    assert held["model.safetensors"] == (head / "model.safetensors").read_bytes()
    about = json.loads(held["headsmith.json"])
    assert about["target"]["path"] == BASE
    assert "someone" not in str(about) and "/data/" not in str(about) and "/tmp" not in str(about)

    assert run(cli, ["pull", NAME]) == 0
    folder = Path(capsys.readouterr().out.strip())
    for name in files - {".gitattributes"}:
        assert (folder / name).read_bytes() == held[name]
    assert run(cli, ["pull", NAME, "--into", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == held["model.safetensors"]
    assert run(cli, ["pull", NAME, "--into", str(head)]) == 2
    assert "holds something that was not pulled" in capsys.readouterr().err


def test_what_is_there_is_not_sent_again(
    hub: Any, head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(head) == 0
    commits, sent = len(hub.repos[NAME].commits), hub.sent["in"]
    capsys.readouterr()
    assert push(head) == 0
    assert "already there, nothing was sent" in capsys.readouterr().out
    assert (len(hub.repos[NAME].commits), hub.sent["in"]) == (commits, sent)


def test_another_head_is_never_overwritten_silently(
    hub: Any, head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(head) == 0
    first = hub.tree(NAME)
    changed(head)
    capsys.readouterr()
    assert push(head) == 2
    said = capsys.readouterr().err
    assert f"{NAME} holds another README.md in its revision main; publish this one beside" in said
    assert hub.tree(NAME) == first
    assert push(head, "--revision", "v2") == 0
    assert hub.tree(NAME) == first
    second = hub.tree(NAME, "v2")
    assert second["model.safetensors"] == (head / "model.safetensors").read_bytes()
    # That branch now holds a head of its own.
    changed(head)
    assert push(head, "--revision", "v2") == 2 and hub.tree(NAME, "v2") == second
    (head / "LICENSE").write_text("of the head")
    assert push(head, "--force") == 0
    assert hub.tree(NAME)["model.safetensors"] == (head / "model.safetensors").read_bytes()
    # The first is still there by its commit.
    assert first in [hub.tree(NAME, sha) for sha in hub.repos[NAME].commits]


def test_a_card_that_was_edited_there_is_kept(hub: Any, head: Path) -> None:
    assert push(head) == 0
    repo = hub.repos[NAME]
    repo.commit("main", repo.commits[repo.branches["main"]] | {"README.md": b"by hand"})
    assert push(head) == 2
    assert hub.tree(NAME)["README.md"] == b"by hand"


def test_files_of_an_earlier_head_go(hub: Any, head: Path) -> None:
    assert push(head) == 0
    repo = hub.repos[NAME]
    more = {"medusa_tree.json": b"{}", "model-00001-of-00002.safetensors": b"1", "notes.txt": b"2"}
    repo.commit("main", repo.commits[repo.branches["main"]] | more)
    assert push(head) == 2
    assert push(head, "--force") == 0
    assert hub.tree(NAME).keys() & more.keys() == {"notes.txt"}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 20_000])
def test_a_connection_that_is_cut_goes_on(
    hub: Any, head: Path, chunk: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.chunk = chunk
    hub.cut["PUT"] = 1
    assert push(head) == 0
    assert hub.cut["PUT"] < 0
    assert hub.tree(NAME)["model.safetensors"] == (head / "model.safetensors").read_bytes()
    # The client keeps what it got in pieces of this size.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut["GET"] = 1
    assert run(cli, ["pull", NAME, "--into", str(tmp_path / "mine")]) == 0
    whole = (head / "model.safetensors").read_bytes()
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == whole
    # The second request asked for the rest only.
    half = len(whole) // 2
    kept = half - half % 1000
    assert hub.ranges == [f"bytes={kept}-"]
    assert hub.sent["out"] == half + len(whole) - kept


def test_a_push_that_failed_is_run_again(
    hub: Any, head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.cut["COMMIT"] = 1
    assert push(head, "--revision", "v2") == 4
    said = capsys.readouterr().err.splitlines()
    assert "cannot be written" in said[-1] and "check the network, and run again" in said[-1]
    assert hub.tree(NAME, "v2").keys() == {".gitattributes"}
    # What arrived is not sent twice, and the branch that was made is not taken for another head's.
    sent = hub.sent["in"]
    assert sent == (head / "model.safetensors").stat().st_size
    assert push(head, "--revision", "v2") == 0
    assert hub.sent["in"] == sent
    assert hub.tree(NAME, "v2").keys() > {"README.md", "model.safetensors"}


def test_somebody_was_faster(hub: Any, head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.cut["RIVAL"] = 1
    assert push(head) == 2
    assert hub.tree(NAME) == {"README.md": b"theirs"}
    assert "cannot be written" in capsys.readouterr().err


def test_faults_are_one_sentence(
    hub: Any, head: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*args: object) -> str:
        capsys.readouterr()
        assert run(cli, [str(arg) for arg in args]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    assert "names no repository of the Hub" in said("pull", "nonsense")
    assert "there is none of this name, and there is no folder ORG/none here" in said(
        "pull", "ORG/none"
    )
    assert push(head, "--public") == 0 and not hub.repos[NAME].private
    assert "it has no revision v9" in said("pull", f"{NAME}@v9")
    hub.repos["ORG/empty"] = type(hub.repos[NAME])(False)
    hub.repos["ORG/empty"].commit("main", {"README.md": b"hello"})
    assert "holds no head" in said("pull", "ORG/empty")
    assert "there is none of this name" in said("eval", "--head=ORG/none", "--target=x")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "this account may not; log in" in said(
        "push", head, "--repo", NAME, "--base-model", BASE
    )


def test_a_hub_that_is_not_there(
    hub: Any, head: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert push(head) == 4
    assert "check the network" in capsys.readouterr().err
    assert run(cli, ["pull", NAME]) == 4


@pytest.mark.slow
def test_as_a_user_types_it_with_the_environment_alone(
    hub: Any, head: Path, tmp_path: Path, root: Path
) -> None:
    env = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(root)}

    def typed(*args: object) -> str:
        command = [sys.executable, "-m", "headsmith", *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    typed("push", head, "--repo", NAME, "--base-model", BASE)
    folder = Path(typed("pull", NAME).strip())
    assert folder.is_relative_to(tmp_path / "home")
    assert (folder / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()
