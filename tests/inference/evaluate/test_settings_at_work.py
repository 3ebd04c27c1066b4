"""Rules and sampling settings through `evaluate`: what is measured, checked and said of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from headsmith.errors import EqualityFailed, HeadsmithError
from headsmith.inference.evaluate import evaluate, raise_if_unequal
from headsmith.inference.report import print_report
from headsmith.inference.settings import EvalSettings


@pytest.mark.parametrize("rule", ["sample", "greedy"])
def test_settings_are_in_the_text_the_check_and_the_title(
    rule: str, settings: EvalSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    cuts = {"top_p": 0.9, "top_k": 50} if rule == "sample" else {}
    shaped = replace(
        settings, rule=rule, repetition_penalty=1.3, logit_bias=("7=2.5",), baseline=True, **cuts
    )
    result = evaluate(shaped)
    equality = result["equality"]
    assert equality["exact"] == equality["checked"] > 0
    assert equality["identical_to_baseline"] == equality["compared_to_baseline"] == 4
    setup = result["setup"]
    assert (setup["repetition_penalty"], setup["logit_bias"]) == (1.3, {"7": 2.5})
    assert (setup["top_p"], setup["min_p"]) == (cuts.get("top_p"), None)
    print_report(result, Console(width=300))
    said = capsys.readouterr().out
    assert "repetition-penalty 1.3, logit-bias of 1 ids" in said
    assert ("sample at temperature 1, top-k 50, top-p 0.9" in said) == (rule == "sample")


def test_ratio_is_held_to_the_distribution(
    settings: EvalSettings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drawing = replace(settings, rule="ratio", temperature=0.8, top_p=0.95, batch=(1, 2))
    result = evaluate(replace(drawing, draft="branches:2,1", out=str(tmp_path / "a")))
    raise_if_unequal(result)
    assert result["equality"] is None and result["lossy"] is None and result["setup"]["lossless"]
    drawn = result["distribution"]
    assert drawn["tokens"] == result["overall"]["tokens"] and drawn["impossible"] == 0
    assert abs(drawn["z"]) < 4
    assert not any("differ from those at batch" in one for one in result["warnings"])
    print_report(result, Console(width=300))
    said = capsys.readouterr().out
    assert "ratio at temperature 0.8, top-p 0.95" in said and "that it could not draw" in said
    with pytest.raises(EqualityFailed, match="3 of 32 output tokens could not be drawn"):
        raise_if_unequal(result | {"distribution": drawn | {"tokens": 32, "impossible": 3}})


def test_a_bias_on_an_id_that_the_target_lacks_is_refused(settings: EvalSettings) -> None:
    with pytest.raises(HeadsmithError, match="logit-bias names token 99999 and the target's ids"):
        evaluate(replace(settings, logit_bias=("99999=1",)))
