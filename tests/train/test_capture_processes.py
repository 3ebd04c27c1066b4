"""A capture in processes of its own: killed and resumed to the same bytes, shared by ranks,
followed by a training that waits for it.
"""

import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from headsmith.data import feature_store
from headsmith.data.capture import is_capturing
from headsmith.data.feature_store import Store
from headsmith.train.capture import capture
from headsmith.train.recipe import load_recipe

pytestmark = pytest.mark.slow
QUICK = ("train.max_steps=4", "validation.holdout=0", "data.max_rows=16")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_ten_kills_leave_the_same_files(recipe_file: Path, tmp_path: Path, captures: Any) -> None:
    log, killed, whole = tmp_path / "log", tmp_path / "killed", tmp_path / "whole"
    common = (recipe_file, "data.row_tokens=128", "--dtype=float32", "--shard-mb=0.1")
    captures(log, *common, "--out", whole).finish()
    total = len(Store.open(whole).shards)
    assert total > 20
    chooser, done = random.Random(time.time_ns()), []
    for kill in range(10):
        process = captures(log, *common, "--out", killed)
        wanted = total * kill // 11 + chooser.randint(0, 2)
        while process.process.is_alive() and len(list(killed.glob("shard-*.json"))) < wanted:
            time.sleep(0.001)
        time.sleep(chooser.uniform(0, 0.02))
        process.signal(signal.SIGKILL)
        process.finish(-signal.SIGKILL)
        done.append(len(list(killed.glob("shard-*.json"))))
    assert done == sorted(done) and done[-1] < total
    said = captures(log, *common, "--out", killed).finish()
    assert files(killed) == files(whole), done
    assert "Traceback" not in said


def test_a_kill_in_the_middle_of_a_shard(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every point between the first byte and the last there is something to go on from."""
    recipe, whole, out = load_recipe(str(recipe_file), QUICK), tmp_path / "whole", tmp_path / "out"
    capture(recipe, whole, "bfloat16", 0.1)

    class Killed(BaseException):
        """Ends the capture as a signal would: nothing catches it."""

    def dies(*_: object) -> None:
        raise Killed

    for name in ("save_file", "checksums", "write_json"):
        with monkeypatch.context() as patched:
            patched.setattr(feature_store, name, dies)
            with pytest.raises(Killed):
                capture(recipe, out, "bfloat16", 0.1)
        assert not list(out.glob("shard-*.json"))
    capture(recipe, out, "bfloat16", 0.1)
    assert files(out) == files(whole)


def test_two_ranks_share_the_shards(recipe_file: Path, tmp_path: Path, captures: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = (recipe_file, "data.row_tokens=128", "--shard-mb=0.1", "--dtype=float32")
    captures(tmp_path / "log", *common, "--out", tmp_path / "one").finish()
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        captures(
            tmp_path / rank, *common, "--out", tmp_path / "two", RANK=rank, LOCAL_RANK=rank, **group
        )
        for rank in ("0", "1")
    ]
    said = [process.finish() for process in ranks]
    assert "bytes a token" in said[0] and "bytes a token" not in said[1]
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert two.pop(".capturing-1") == b"" and two == one
    assert len(Store.open(tmp_path / "two").shards) > 1


def test_training_follows_a_capture_and_ends_when_it_is_gone(
    recipe_file: Path, tmp_path: Path, captures: Any, training: Any, metrics: Any
) -> None:
    log, store, out = tmp_path / "log", tmp_path / "store", tmp_path / "out"
    common = (recipe_file, "data.row_tokens=128", "validation.holdout=0", "train.max_steps=8")
    capture(load_recipe(str(recipe_file), common[1:]), store, "float32", 0.1)
    kept = Store.open(store)
    assert len(kept.shards) > 1
    # The last shard is not there yet, and a capture is at work: stopped, so that it stays so.
    last = len(kept.shards) - 1
    for attempt in range(5):
        for path in (kept.file(last), kept.sums(last)):
            path.unlink()
        process = captures(tmp_path / f"c{attempt}", *common, "--out", store, "--dtype=float32")
        while not is_capturing(store):
            time.sleep(0.01)
        process.signal(signal.SIGSTOP)
        if not kept.is_done(last):
            break
        process.signal(signal.SIGCONT)
        process.finish()
    assert not kept.is_done(last), "five captures were quicker than the signal"
    train_on = (*common, f"data.features={store}", "head.init=balanced")
    follower = training(log, *train_on)
    _wait_for(log, "waiting for shard-", follower)
    reached = metrics(out)
    process.signal(signal.SIGKILL)
    process.process.join(60)
    said = follower.finish(2)
    assert "no process is capturing it" in said and "goes on where it stopped" in said
    captures(tmp_path / "c", *common, "--out", store, "--dtype=float32").finish()
    said = training(log, *train_on).finish()
    assert [line["step"] for line in metrics(out)] == list(range(1, 9))
    assert metrics(out)[: len(reached)] == reached


def test_training_waits_for_what_is_being_captured(
    recipe_file: Path, tmp_path: Path, captures: Any, training: Any, metrics: Any
) -> None:
    store = tmp_path / "store"
    common = (recipe_file, *QUICK)
    process = captures(tmp_path / "c", *common, "--out", store)
    while not is_capturing(store):
        time.sleep(0.005)
    process.signal(signal.SIGSTOP)
    follower = training(tmp_path / "log", *common, f"data.features={store}")
    _wait_for(tmp_path / "log", "features: waiting for", follower)
    process.signal(signal.SIGCONT)
    process.finish()
    follower.finish()
    assert len(metrics(tmp_path / "out")) == 4


def _wait_for(log: Path, text: str, process: Any) -> None:
    while process.process.is_alive():
        if log.exists() and text in log.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(log.read_text())
