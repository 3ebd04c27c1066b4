"""Mixtures: shares, seeds, and the same rows whatever they are called."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headsmith.cli import cli, run
from headsmith.data.mix import Mixed, mix, parse_sources
from headsmith.errors import HeadsmithError

Mixing = Callable[..., list[str]]


@pytest.fixture
def files(write: Callable[[str, str], Path]) -> Callable[..., list[str]]:
    """files(a=60, b=30): files of so many rows, called a0, a1, ..."""

    def make(**sizes: int) -> list[str]:
        return [
            str(write(name, "".join(_row(f"{name}{i}") for i in range(size))))
            for name, size in ((f"{name}.jsonl", size) for name, size in sizes.items())
        ]

    def _row(text: str) -> str:
        return json.dumps({"prompt": text.replace(".jsonl", "")}) + "\n"

    return make


@pytest.fixture
def mixed(tmp_path: Path) -> Mixing:
    """mixed(sources, weights, **options): what the users of the mixture say, in order."""

    def call(sources: Sequence[str], weights: Any = None, **options: Any) -> list[str]:
        out = tmp_path / "mix.out"
        result = mix(sources, out, weights, **options)
        said = [json.loads(line)["turns"][0] for line in out.read_text().splitlines()]
        by_file = Counter(text[0] for text in said)
        assert isinstance(result, Mixed)
        assert {Path(s).stem: n for s, n in result.written.items()} == by_file
        return said

    return call


def shares(texts: list[str]) -> dict[str, int]:
    return dict(sorted(Counter(text[0] for text in texts).items()))


def test_weights_are_shares_of_the_rows(files: Any, mixed: Mixing) -> None:
    sources = files(a=60, b=30, c=10)
    assert shares(mixed(sources)) == {"a": 60, "b": 30, "c": 10}
    # As many rows as the scarcest allows.
    assert shares(mixed(sources, [2, 1, 1])) == {"a": 20, "b": 10, "c": 10}
    assert shares(mixed(sources, [0.2, 0.1, 0.1], rows=7)) == {"a": 3, "b": 2, "c": 2}
    assert shares(mixed(sources, [1, 1, 1], rows=10)) == {"a": 4, "b": 3, "c": 3}
    # Without weights a source's size is its weight.
    assert shares(mixed(sources, rows=50)) == {"a": 30, "b": 15, "c": 5}
    assert len(set(mixed(sources))) == 100


def test_the_seed_decides_and_names_do_not(files: Any, mixed: Mixing, tmp_path: Path) -> None:
    sources = files(a=60, b=30)
    first = mixed(sources, [1, 1], rows=20, seed=1)
    assert mixed(sources, [1, 1], rows=20, seed=1) == first
    assert mixed(sources, [1, 1], rows=20, seed=2) != first
    # Interleaved, not one behind the other.
    assert "".join(text[0] for text in first) not in ("a" * 10 + "b" * 10, "b" * 10 + "a" * 10)
    larger = mixed(sources, [1, 1], rows=40, seed=1)
    assert set(first) < set(larger) and [t for t in larger if t in first] == first
    # The same rows in another order, under other ids.
    turned = tmp_path / "turned.jsonl"
    lines = Path(sources[0]).read_text().splitlines()[::-1]
    turned.write_text(
        "".join(json.dumps({"id": i, **json.loads(x)}) + "\n" for i, x in enumerate(lines))
    )
    again = tmp_path / "again.out"
    mix([str(turned), sources[1]], again, [1, 1], rows=20, seed=1)
    said = [json.loads(line)["turns"][0] for line in again.read_text().splitlines()]
    assert said == first


def test_rows_come_again_only_on_request(files: Any, mixed: Mixing) -> None:
    sources = files(a=60, b=4)
    with pytest.raises(
        HeadsmithError, match=r"20 rows take 10 of .*b\.jsonl, which has 4; ask for at most 8"
    ):
        mixed(sources, [1, 1], rows=20)
    texts = mixed(sources, [1, 1], rows=20, repeat=True)
    counts = Counter(text for text in texts if text[0] == "b")
    assert sorted(counts.values()) == [2, 2, 3, 3]
    result = mix(sources, Path(sources[0]).with_name("o"), [1, 1], rows=20, repeat=True)
    assert result.repeated == {sources[0]: 0, sources[1]: 6}


def test_equal_rows_are_not_drawn_together(mixed: Mixing, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a same"}\n' * 50 + '{"prompt": "a other"}\n' * 50)
    counts = Counter(mixed([str(path)], rows=40))
    assert 8 < counts["a same"] < 32


def test_sources_and_weights_as_typed(tmp_path: Path) -> None:
    odd = tmp_path / "a=1"
    odd.write_text("")
    assert parse_sources(["a.jsonl", "org/b"]) == (["a.jsonl", "org/b"], None)
    assert parse_sources(["a.jsonl=2", "org/b=0.5"]) == (["a.jsonl", "org/b"], [2.0, 0.5])
    assert parse_sources([str(odd)]) == ([str(odd)], None)
    assert parse_sources([f"{odd}=3"]) == ([str(odd)], [3.0])
    with pytest.raises(HeadsmithError, match="b.jsonl has no weight and others have"):
        parse_sources(["a.jsonl=2", "b.jsonl"])
    for bad in ("x", "0", "-1", "nan", "inf"):
        with pytest.raises(HeadsmithError, match="must be a number above 0"):
            parse_sources([f"a.jsonl={bad}"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 0}, "rows is 0; it must be 1 or more"),
        ({"weights": [1]}, "2 sources have 1 weights"),
        ({"weights": [1, 1000], "rows": 5}, "5 rows leave none for"),
    ],
)
def test_what_cannot_be(files: Any, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadsmithError, match=words):
        mix(files(a=6, b=6), tmp_path / "o", **options)
    assert not (tmp_path / "o").exists()


def test_the_command(files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = files(a=60, b=30)
    Path(b).write_text(Path(b).read_text() + '{"text": 1}\nnot json\n')
    out = tmp_path / "mix.out"
    assert run(cli, ["data", "mix", f"{a}=1", f"{b}=3", "--rows=20", "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert f"{out}: 20 rows" in said and f"{b}: 15 of 30 rows (75.0%)" in said
    assert "not read, no messages: 1" in said and "not read, line is not JSON: 1" in said
    assert f"warning: {b}: 1 lines are not JSON" in said
    assert run(cli, ["data", "mix", f"{a}=x", "--out", str(out)]) == 2
    assert run(cli, ["data", "mix", str(tmp_path / "none.jsonl"), "--out", str(out)]) == 2
    assert all(
        line.startswith("headsmith: error: ") for line in capsys.readouterr().err.splitlines()
    )
