"""Kind 10: a disk that is full at a checkpoint, at a result and at the data."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

FULL = OSError(errno.ENOSPC, "No space left on device")


def raise_full(*args: object, **kwargs: object) -> None:
    raise FULL


@pytest.mark.slow
def test_10_disk_full_at_a_checkpoint(user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save, saved = torch.save, []

    def second_fails(*args: Any, **kwargs: Any) -> None:
        saved.append(args[1])
        save(*args, **kwargs)
        if len(saved) == 2:
            raise RuntimeError("[enforce fail at inline_container.cc] PytorchStreamWriter failed")

    monkeypatch.setattr(torch, "save", second_fails)
    code, said = user.type(*user.train())
    assert code == 4 and len(saved) == 2
    errors = [line for line in said if line.startswith("headsmith: error")]
    assert errors == said[-1:]
    out = user.folder / "out"
    user.check(said[-1], f"disk is full while writing {out / 'step-000002'}; free some space")
    assert (out / "latest").resolve().name == "step-000001"
    assert not [name for name in user.left() if ".tmp" in name or "step-000002" in name]
    # With space again the same command goes on.
    monkeypatch.undo()
    monkeypatch.setenv("HEADSMITH_HOME", str(user.folder / "home"))
    code, said = user.type(*user.train())
    assert code == 0 and any("after step 1" in line for line in said)
    assert (out / "latest").resolve().name == "step-000002"


@pytest.mark.slow
def test_10_disk_full_at_a_result(user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = user.folder / "deep" / "out"
    monkeypatch.setattr("headsmith.inference.result.write_json", raise_full)
    sentence = f"disk is full while writing {out}; free some space and run again"
    # The requests that were finished, for the run that goes on from there.
    finished = out / "unfinished.jsonl"
    user.refused(user.eval(out=out), sentence, code=4, kept=(out.parent, out, finished))
    assert '"request": "' in finished.read_text()
    (out / "result.json").write_text("an earlier one")
    user.refused(user.eval(out=out), sentence, code=4)
    assert (out / "result.json").read_text() == "an earlier one"


def test_10_disk_full_at_the_data(user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.Dataset.save_to_disk", raise_full)
    sentence = f"disk is full while writing {user.folder / 'prepared'}/data-.*; free some space"
    user.refused(user.prepare(user.parts.data), sentence, code=4)
    user.refused(user.train(), sentence, code=4)
