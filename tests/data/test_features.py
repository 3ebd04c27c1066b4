"""The feature store by itself: what it keeps of states, how it tells damage, who writes."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from headsmith.data.capture import capture, capturing, clear_temporaries, is_capturing, plan
from headsmith.data.feature_codec import DTYPES, DType, Shape, decode, encode
from headsmith.data.feature_store import Store, check_shard, cut
from headsmith.data.pack import Row
from headsmith.data.states import States, read_tokens
from headsmith.errors import HeadsmithError

M, H = 3, 16
ABOUT = {"target": "sha256:a", "taps": [2, 4, 5], "dtype": "bfloat16", "data": "sha256:b"}


def make_states(seed: int, tokens: int = 6, read: int = 4) -> States:
    """Random states with a first token that is hundreds of times louder, as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(tokens, M, H, generator=generator)
    taps[0, 1] *= 500
    return States(
        taps,
        torch.randn(read, H, generator=generator),
        torch.randint(0, 99, (read,), generator=generator),
        torch.randn(read, generator=generator),
    )


def decoded(states: States, dtype: DType, places: tuple[int, ...] = (0, 1, 2)) -> States:
    return decode(encode(states, dtype), list(places), torch.float32, "cpu")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Five rows in three shards, all written."""
    made = plan(tmp_path / "store", dict(ABOUT), [[3, 0], [1, 4], [2]], {})
    capture(made, range(3), make_states, lambda row, size: None)
    return made


def test_float32_keeps_every_bit() -> None:
    states, again = make_states(0), decoded(make_states(0), "float32")
    for name in ("taps", "last", "choice", "logsumexp"):
        assert torch.equal(getattr(again, name), getattr(states, name))


@pytest.mark.parametrize(
    ("dtype", "taps", "last"), [("bfloat16", 2**-8, 2**-8), ("fp8", 2**-4, 2**-8)]
)
def test_rounding_is_relative_to_each_token_and_tap(dtype: DType, taps: float, last: float) -> None:
    states, again = make_states(0), decoded(make_states(0), dtype)
    for found, own, bound in ((again.taps, states.taps, taps), (again.last, states.last, last)):
        gap = (found - own).abs()
        assert 0 < (gap / own.abs().amax(-1, keepdim=True)).max() <= bound
    # A loud token takes nothing from its neighbours, nor a loud tap from the others of its token.
    quiet = torch.ones(len(states.taps), M, dtype=torch.bool)
    quiet[0, 1] = False
    assert (again.taps - states.taps)[quiet].abs().max() <= taps * states.taps[quiet].abs().max()
    assert torch.equal(again.choice, states.choice) and torch.equal(
        again.logsumexp, states.logsumexp
    )


def test_a_token_of_zeros_stays_zero_in_fp8() -> None:
    states = make_states(0)
    states.taps[2] = 0
    assert torch.equal(decoded(states, "fp8").taps[2], torch.zeros(M, H))


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_of_the_taps(dtype: DType) -> None:
    states = make_states(1)
    assert torch.equal(decoded(states, dtype, (0, 2)).taps, decoded(states, dtype).taps[:, [0, 2]])
    assert decoded(states, dtype, ()).taps.shape == (6, 0, H)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_size_is_known_before(dtype: DType) -> None:
    found = sum(tensor.nbytes for tensor in encode(make_states(0), dtype).values())
    assert found == Shape(M, H, dtype).nbytes(6, 4)


def test_which_tokens_are_read() -> None:
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    row = Row(torch.arange(14), mask, [7, 5, 2])
    # Trained pairs (2, 3), (3, 4) and (10, 11); pair (12, 13) begins its document.
    assert read_tokens(row).tolist() == [1, 2, 3, 9, 10]
    assert read_tokens(Row(torch.arange(1), mask[2:3], [1])).tolist() == []


def test_shards_hold_what_fits_in_the_order_that_was_given() -> None:
    assert cut([2, 0, 1, 3], [5, 20, 4, 3], 10) == [[2, 0], [1], [3]]


def test_rows_come_back_in_any_order(store: Store) -> None:
    again = Store.open(store.folder)
    assert again.about == ABOUT and again.shards == store.shards and again.done == 3
    for row in (2, 0, 4, 1, 3, 0):
        for name, tensor in encode(make_states(row), "bfloat16").items():
            assert torch.equal(again.read(row)[name], tensor)
    assert [check_shard(again, shard) for shard in range(3)] == [[], [], []]


def test_every_flipped_bit_is_found_and_named(store: Store) -> None:
    file = store.file(1)
    whole = file.read_bytes()
    parts = store.read_sums(1)["parts"]
    start, places = 0, {}
    for name, part in parts.items():
        places[name] = (start, start + part["bytes"])
        start += part["bytes"]
    assert start == len(whole) and set(places) >= {"header", "row-000004.taps", "row-000001.last"}
    for name, (start, end) in places.items():
        for at in {start, (start + end) // 2, end - 1}:
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            file.write_bytes(damaged)
            (fault,) = check_shard(store, 1)
            assert f"shard-00001.safetensors: {name} is damaged" in fault
            assert f"(bytes {start} to {end})" in fault
            with pytest.raises(
                HeadsmithError, match="shard-00001.safetensors is damaged"
            ) as caught:
                for row in store.shards[1]:
                    Store.open(store.folder).read(row)
            assert name == "header" or name in str(caught.value)


def test_a_shard_that_is_cut_off_or_gone(store: Store) -> None:
    file = store.file(0)
    file.write_bytes(file.read_bytes()[:-7])
    assert "bytes," in check_shard(store, 0)[0]
    with pytest.raises(HeadsmithError, match="remove shard-00000"):
        store.read(3)
    file.unlink()
    assert "is missing" in check_shard(store, 0)[0]
    with pytest.raises(HeadsmithError, match="shard-00000.safetensors is damaged"):
        store.read(3)


def test_sums_that_are_damaged(store: Store) -> None:
    path = store.sums(0)
    sums = json.loads(path.read_text())
    path.write_text(json.dumps({**sums, "sha256": "0" * 64}))
    assert "contradict each other" in check_shard(store, 0)[0]
    path.write_text("{")
    with pytest.raises(HeadsmithError, match="shard-00000.json cannot be read"):
        store.read(0)


def test_a_shard_of_another_store_is_refused(store: Store, tmp_path: Path) -> None:
    other = plan(tmp_path / "other", {**ABOUT, "taps": [1, 2, 3]}, store.shards, {})
    capture(other, [0], make_states, lambda row, size: None)
    for path in (other.file(0), other.sums(0)):
        (store.folder / path.name).write_bytes(path.read_bytes())
    with pytest.raises(HeadsmithError, match=r"the taps is \[1, 2, 3\] there and \[2, 4, 5\] here"):
        store.read(0)


def test_another_capture_into_the_same_folder_is_refused(store: Store) -> None:
    with pytest.raises(HeadsmithError, match="fingerprint is sha256:a there and sha256:z here"):
        plan(store.folder, {**ABOUT, "target": "sha256:z"}, store.shards, {})


def test_an_index_that_is_damaged_or_not_there(store: Store, tmp_path: Path) -> None:
    for text in ("{", "[]", '{"schema": "headsmith.features/1"}'):
        (store.folder / "store.json").write_text(text)
        with pytest.raises(HeadsmithError, match="it is damaged"):
            Store.open(store.folder)
    (store.folder / "store.json").write_text('{"schema": "headsmith.features/9"}')
    with pytest.raises(HeadsmithError, match="of the schema headsmith.features/9"):
        Store.open(store.folder)
    with pytest.raises(HeadsmithError, match="headsmith data capture"):
        Store.open(tmp_path / "nothing")


def test_only_what_is_missing_is_made_and_leftovers_go(store: Store) -> None:
    before = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    store.sums(1).unlink()
    store.file(2).unlink(), store.sums(2).unlink()
    (store.folder / ".shard-00001.safetensors.x.tmp").write_text("half")
    made: list[int] = []

    def states(row: int) -> States:
        made.append(row)
        return make_states(row)

    clear_temporaries(store, 1)
    capture(store, range(3), states, lambda row, size: None)
    assert made == [1, 4, 2]
    assert {path.name: path.read_bytes() for path in store.folder.iterdir()} == before


def hold(folder: Path, held: Any, leave: Any) -> None:
    with capturing(folder, 1):
        held.set()
        leave.wait(60)


def test_a_capture_is_alive_until_its_process_ends(tmp_path: Path) -> None:
    assert not is_capturing(tmp_path)
    context = multiprocessing.get_context("fork")
    held, leave = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, held, leave))
    process.start()
    assert held.wait(60) and is_capturing(tmp_path)
    with (
        pytest.raises(HeadsmithError, match="another process is capturing"),
        capturing(tmp_path, 1),
    ):
        pass
    process.kill()
    process.join()
    assert not is_capturing(tmp_path)
    with capturing(tmp_path, 1):
        assert is_capturing(tmp_path)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadsmithError, match="a file is in the way"), capturing(tmp_path / "file"):
        pass
