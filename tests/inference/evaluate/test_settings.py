"""Settings that are refused before anything is loaded."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest

from headsmith.errors import HeadsmithError
from headsmith.inference.cli import batch_sizes, context_lengths, eval_
from headsmith.inference.settings import EvalSettings


def test_the_command_line_and_the_settings_have_the_same_defaults() -> None:
    given = eval_.make_context("eval", []).params
    assert given.pop("json_path") is None
    given |= {"batch": batch_sizes(given["batch"]), "context": context_lengths(given["context"])}
    defaults = {one.name: one.default for one in dataclasses.fields(EvalSettings)}
    assert given == {name: value for name, value in defaults.items() if name != "command"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"draft": "chain:-2"}, "depth is -2"),
        ({"draft": "chain:0"}, "depth is 0"),
        ({"draft": "bush:3"}, "neither chain:DEPTH nor tree"),
        ({"drafter": "oracle"}, "drafter is 'oracle'; it can be head, none"),
        ({"drafter": "ngram", "draft": "stored"}, "draft stored cannot be filled by drafter ngram"),
        ({"drafter": "lookahead", "draft": "chain:4"}, "leave --draft out"),
        ({"drafter": "text:/no/such"}, "there is no file /no/such"),
        ({"drafter": "ngram", "draft": "chain:0"}, "depth is 0"),
        ({"drafter": "ngram", "rule": "typical"}, "typical judges the drafts of a head"),
        ({"rule": "ratio"}, "rule is 'ratio'; it can be greedy, sample, typical"),
        ({"temperature": 0.7}, "rule greedy has no temperature, but 0.7 was asked for"),
        ({"rule": "sample", "temperature": -1}, "temperature is -1"),
        ({"rule": "sample", "temperature": math.nan}, "temperature is nan"),
        ({"rule": "sample", "posterior_alpha": 0.3}, "posterior-alpha means nothing for rule sam"),
        ({"posterior_threshold": 0.3}, "posterior-threshold means nothing for rule greedy"),
        ({"rule": "typical", "posterior_threshold": 0.0}, "posterior-threshold is 0.0"),
        ({"rule": "typical", "posterior_alpha": 1.5}, "posterior-alpha is 1.5"),
        ({"rule": "typical", "drafter": "none", "head": None}, "typical judges the drafts of a h"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"batch": ()}, "name each batch size once"),
        ({"batch": (1, 1)}, "name each batch size once"),
        ({"batch": (0,)}, "batch is 0"),
        ({"max_new_tokens": 0}, "max-new-tokens is 0"),
        ({"limit": -1}, "limit is -1"),
        ({"threads": 0}, "threads is 0"),
        ({"stop": ("",)}, "stop string is empty"),
        ({"head": None}, "which head"),
        ({"head": "/no/such/folder"}, "there is no head in /no/such/folder"),
        ({"drafter": "none", "target": None}, "add --target"),
    ],
)
def test_settings_are_refused_in_one_sentence(
    settings: EvalSettings, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(HeadsmithError, match=sentence) as fault:
        replace(settings, **change)
    assert fault.value.exit_code == 2 and "\n" not in str(fault.value)
