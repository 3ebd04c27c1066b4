"""De-duplication: against a comparison of all pairs, and what a person sees of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headsmith.cli import cli, run
from headsmith.data.dedup import NGRAM, band_width, dedup
from headsmith.data.words import words
from headsmith.errors import HeadsmithError

Write = Callable[..., Path]


@pytest.fixture
def rows(tmp_path: Path) -> Write:
    """rows([texts of a conversation, ...], name="a.jsonl"): a file; ids are the row numbers."""

    def write(conversations: list[list[str]], name: str = "a.jsonl") -> Path:
        roles = ("user", "assistant")
        path = tmp_path / name
        with path.open("w") as file:
            for number, texts in enumerate(conversations):
                messages = [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]
                file.write(json.dumps({"id": number, "messages": messages}) + "\n")
        return path

    return write


def kept(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_exact_duplicates_have_the_same_words(rows: Write, tmp_path: Path) -> None:
    source = rows([["Hi!", "Hello."], ["hi", "hello"], ["Hi", "hello there"], ["Hi hello"]])
    result = dedup([str(source)], tmp_path / "out.jsonl", near=None)
    # Who speaks counts: the last one is no copy of the first.
    assert kept(tmp_path / "out.jsonl") == ["0", "2", "3"]
    assert (result.read, result.kept, result.left_out) == (4, 3, {"exact": 1})
    (example,) = result.examples
    assert example.dropped == f"1 of {source}" and example.kept == f"0 of {source}"


def test_the_first_of_all_sources_stays(rows: Write, tmp_path: Path) -> None:
    one, two = rows([["q", "a"]]), rows([["r", "b"], ["Q", "A"]], "b.jsonl")
    dedup([str(one), str(two)], tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["source"], line["id"]) for line in lines] == [(str(one), "0"), (str(two), "0")]


def test_by_prompt_the_answers_do_not_count(rows: Write, tmp_path: Path) -> None:
    source = rows([["q", "one"], ["q", "two"], ["q", "one", "r"]])
    dedup([str(source)], tmp_path / "out.jsonl", by="prompt")
    assert kept(tmp_path / "out.jsonl") == ["0", "2"]
    dedup([str(source)], tmp_path / "out.jsonl")
    assert kept(tmp_path / "out.jsonl") == ["0", "1", "2"]


def shingles(text: str) -> set[tuple[str, ...]]:
    parts = ["user:", *words(text)]
    return set(zip(*(parts[i:] for i in range(NGRAM)), strict=False))


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_near_duplicates_are_those_of_a_comparison_of_all_pairs(
    rows: Write, tmp_path: Path, threshold: float
) -> None:
    draw = random.Random(1)
    texts: list[str] = []
    for _ in range(60):
        text = [f"w{draw.randrange(400)}" for _ in range(draw.randint(20, 60))]
        # Copies with more and more changes, on both sides of the threshold.
        for changes in range(draw.randint(0, 8)):
            copy = list(text)
            for place in draw.sample(range(len(copy)), changes):
                copy[place] = f"x{draw.randrange(400)}"
            texts.append(" ".join(copy))
        texts.append(" ".join(text))
    draw.shuffle(texts)
    stays: list[int] = []
    for number, text in enumerate(texts):
        own = shingles(text)
        alike = [len(own & shingles(texts[i])) / len(own | shingles(texts[i])) for i in stays]
        if max(alike, default=0) < threshold:
            stays.append(number)
    assert 60 <= len(stays) < len(texts) - 20
    result = dedup([str(rows([[text] for text in texts]))], tmp_path / "o.jsonl", near=threshold)
    assert kept(tmp_path / "o.jsonl") == list(map(str, stays))
    assert result.kept == len(stays) and result.left_out.total() == len(texts) - len(stays)
    assert all(threshold <= example.alike <= 1 for example in result.examples)


def test_short_texts_are_compared_whole(rows: Write, tmp_path: Path) -> None:
    source = rows([["yes"], ["no"], ["!"], ["?"], ["Yes."]])
    dedup([str(source)], tmp_path / "out.jsonl", near=0.1)
    assert kept(tmp_path / "out.jsonl") == ["0", "1", "2"]


def test_bands_find_what_is_just_alike_enough() -> None:
    widths = [band_width(t) for t in (0.3, 0.5, 0.8, 0.9, 1.0)]
    assert widths == sorted(widths) and widths[0] >= 1 and widths[-1] == 64
    for threshold, width in ((0.5, band_width(0.5)), (0.8, band_width(0.8))):
        assert 1 - (1 - threshold**width) ** (128 // width) >= 0.995
        assert 1 - (1 - threshold ** (width + 1)) ** (128 // (width + 1)) < 0.995


def test_the_command(rows: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = " ".join(f"word{i}" for i in range(40))
    source = rows([[long, "yes"], [long + "!", "Yes"], [long + " more", "yes"], ["other", "a"]])
    out = tmp_path / "out.jsonl"
    assert run(cli, ["data", "dedup", str(source), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert f"{out}: 2 of 4 rows" in said and "near duplicate: 1" in said
    assert "exact duplicate: 1" in said and f"1 of {source} is 100% 0 of {source}" in said
    assert run(cli, ["data", "dedup", str(source), "--exact", "--out", str(out)]) == 0
    assert kept(out) == ["0", "2", "3"]


@pytest.mark.parametrize("near", [0.0, 1.5, -1.0])
def test_a_share_that_is_none(rows: Write, tmp_path: Path, near: float) -> None:
    with pytest.raises(HeadsmithError, match="near is .*; it must be above 0, at most 1"):
        dedup([str(rows([["q"]]))], tmp_path / "out.jsonl", near=near)


def test_what_is_read_is_not_written_over(rows: Write, tmp_path: Path) -> None:
    source = rows([["q", "a"]])
    before = source.read_bytes()
    link: Any = tmp_path / "link.jsonl"
    link.symlink_to(source)
    for out in (source, link):
        with pytest.raises(HeadsmithError, match="is also read"):
            dedup([str(source)], out)
    assert source.read_bytes() == before
