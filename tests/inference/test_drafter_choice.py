"""`--drafter`: every form, its defaults, and what is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headsmith.errors import HeadsmithError
from headsmith.inference.drafter_choice import (
    FORMS,
    FromHead,
    GivenText,
    Lookahead,
    Ngram,
    Nothing,
    SmallModel,
    check_draft,
    parse_drafter,
)
from headsmith.inference.tree import Calibrated, Chain, DynamicTree, RankTree


@pytest.mark.parametrize(
    ("text", "choice", "whole"),
    [
        ("head", FromHead(), "head"),
        ("none", Nothing(), "none"),
        ("ngram", Ngram(), "ngram:2,4,longest"),
        ("ngram:1,3", Ngram(1, 3), "ngram:1,3,longest"),
        ("ngram:5,5,first", Ngram(5, 5, "first"), "ngram:5,5,first"),
        ("lookahead", Lookahead(), "lookahead:7,5,7"),
        ("lookahead:4,3,2", Lookahead(4, 3, 2), "lookahead:4,3,2"),
        ("lookahead:4,3,2,prompt", Lookahead(4, 3, 2, True), "lookahead:4,3,2,prompt"),
        ("model:a/b:c", SmallModel("a/b:c"), "model:a/b:c"),
        ("text", GivenText(), "text"),
    ],
)
def test_every_form(text: str, choice: object, whole: str) -> None:
    found = parse_drafter(text)
    assert found == choice and str(found) == whole and parse_drafter(whole) == found


def test_a_text_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a:b.txt"
    file.write_text("x")
    assert parse_drafter(f"text:{file}") == GivenText(str(file))
    with pytest.raises(HeadsmithError, match="there is no file"):
        parse_drafter(f"text:{tmp_path}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("oracle", "drafter is 'oracle'; it can be head, none, ngram"),
        ("", "drafter is ''"),
        ("head:x", "drafter is 'head:x'"),
        ("none:", "drafter is 'none:'"),
        ("model", "drafter is 'model'"),
        ("model:", "drafter is 'model:'"),
        ("text:", "drafter is 'text:'"),
        ("ngram:", "options that cannot be read"),
        ("ngram:3", "options that cannot be read"),
        ("ngram:a,b", "options that cannot be read"),
        ("ngram:1,2,longest,3", "options that cannot be read"),
        ("ngram:0,2", "n-grams of 0 to 2 tokens are none"),
        ("ngram:3,2", "n-grams of 3 to 2 tokens are none"),
        ("ngram:1,2,best", "'best' is no way to pick a match; give longest, recent, first"),
        ("lookahead:5,4", "options that cannot be read"),
        ("lookahead:5,4,3,text", "options that cannot be read"),
        ("lookahead:0,4,3", "must be at least 1 and level at least 2"),
        ("lookahead:5,1,3", "must be at least 1 and level at least 2"),
        ("lookahead:5,4,0", "must be at least 1 and level at least 2"),
    ],
)
def test_what_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(HeadsmithError) as fault:
        parse_drafter(text)
    assert sentence in str(fault.value) and "\n" not in str(fault.value)


def test_the_shapes_that_each_can_fill() -> None:
    shapes = [Chain(2), DynamicTree(4, 2, 2), RankTree.chain(2), Calibrated()]
    filled = {Ngram(): 2, GivenText(): 2, SmallModel("x"): 3, Lookahead(): 0}
    for choice, count in filled.items():
        for number, shape in enumerate(shapes):
            if number < count:
                check_draft(choice, shape)
            else:
                with pytest.raises(HeadsmithError, match=str(choice)):
                    check_draft(choice, shape)
        check_draft(choice, None)


def test_lookahead_bounds_its_tree() -> None:
    """spec/medusa.md 5.1: W 3, N 4 and one guess are twelve rows, the root included."""
    assert (Lookahead(3, 4, 1).nodes, Lookahead(3, 4, 1).depth) == (11, 4)
    assert (Lookahead(1, 3, 2).nodes, Lookahead(1, 3, 2).depth) == (5, 2)


@pytest.mark.slow
def test_forms_are_read_without_torch() -> None:
    code = (
        "import sys; from headsmith.inference.drafter_choice import parse_drafter as p; p('ngram')"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
    assert all(form in FORMS for form in ("head", "none", "ngram", "lookahead", "model:", "text"))
