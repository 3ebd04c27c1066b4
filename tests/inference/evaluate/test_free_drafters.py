"""`headsmith eval` with drafters that are no heads: the same tables, and who drafted in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headsmith.errors import HeadsmithError
from headsmith.inference.evaluate import evaluate
from headsmith.inference.report import print_report
from headsmith.inference.settings import EvalSettings


@pytest.fixture
def headless(settings: EvalSettings) -> EvalSettings:
    return replace(settings, head=None, drafter="none", max_new_tokens=6)


def measured(settings: EvalSettings, **changes: Any) -> dict[str, Any]:
    """The result, whose text must be the target's own and the baseline's."""
    result = evaluate(replace(settings, **{"draft": ""} | changes))
    equality = result["equality"]
    assert equality["exact"] == equality["checked"] == result["overall"]["tokens"] > 0
    assert equality["identical_to_baseline"] == equality["compared_to_baseline"] == 4
    assert result["head"] is None and result["speed"][0]["speedup"] > 0
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "draft", "named"),
    [
        ("ngram", "", ("ngram:2,4,longest", "chain:4")),
        ("ngram:1,2,recent", "tree:6,2,3", ("ngram:1,2,recent", "tree:6,2,3")),
        ("lookahead:3,3,2", "", ("lookahead:3,3,2", None)),
    ],
)
def test_the_setup_names_the_drafter(
    drafter: str, draft: str, named: tuple[str, str | None], headless: EvalSettings
) -> None:
    result = measured(headless, drafter=drafter, draft=draft)
    setup = result["setup"]
    assert (setup["drafter"], setup["draft"]) == named
    console = Console(record=True, width=120)
    print_report(result, console)
    said = console.export_text()
    assert named[0] in said and "plain decoding (" not in said and "the head" not in said


@pytest.mark.slow
def test_the_target_drafts_for_itself(headless: EvalSettings) -> None:
    result = measured(headless, drafter=f"model:{headless.target}", draft="chain:2")
    # Whatever is not cut at the end: every pass commits three.
    assert result["setup"]["drafter"] == f"model:{headless.target}"
    assert result["overall"]["acceptance_rate"] > 0.7


@pytest.mark.slow
def test_given_texts_of_a_file_and_of_the_prompts(headless: EvalSettings, tmp_path: Path) -> None:
    """A file for all prompts, or a text for each turn of each row."""
    plain = evaluate(replace(headless, out=str(tmp_path / "plain")))
    assert plain["overall"]["tau"] == 1
    lines = (tmp_path / "plain" / "responses.jsonl").read_text().splitlines()
    texts = {one["id"]: one["text"] for one in map(json.loads, lines)}
    rows = [json.loads(line) for line in Path(headless.prompts).read_text().splitlines()]
    for number, row in enumerate(rows):
        if "turns" in row:
            row["given"] = [texts[f"{number}#{turn}"] for turn in (1, 2)]
        else:
            row["given"] = texts[str(number)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = measured(headless, drafter="text", prompts=str(prompts))
    assert given["overall"]["nodes_per_token"] > 0
    file = tmp_path / "one.txt"
    file.write_text(texts["0"])
    assert measured(headless, drafter=f"text:{file}")["setup"]["drafter"] == f"text:{file}"


def test_a_prompt_without_a_text_is_refused_before_anything_runs(headless: EvalSettings) -> None:
    with pytest.raises(HeadsmithError, match="prompt 0 of colours has no given text; add `given`"):
        evaluate(replace(headless, drafter="text"))
