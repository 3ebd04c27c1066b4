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
        ({"rule": "beam"}, "rule is 'beam'; it can be greedy, sample, ratio, typical"),
        ({"top_p": 0.9}, "top-p means nothing for rule greedy, .*; add --rule sample"),
        ({"top_k": 5}, "top-k means nothing for rule greedy"),
        ({"min_p": 0.1}, "min-p means nothing for rule greedy"),
        ({"rule": "typical", "top_p": 0.9}, "rule typical has no top-p"),
        ({"rule": "typical", "repetition_penalty": 1.2}, "typical has no repetition-penalty"),
        ({"rule": "typical", "logit_bias": ("3=1",)}, "rule typical has no logit-bias"),
        ({"rule": "sample", "top_k": 0}, "top-k is 0; it must be 1 or more"),
        ({"rule": "sample", "top_p": 0.0}, "top-p is 0.0; it must be above 0"),
        ({"rule": "ratio", "top_p": 1.1}, "top-p is 1.1"),
        ({"rule": "sample", "min_p": -0.1}, "min-p is -0.1"),
        ({"rule": "sample", "top_p": math.nan}, "top-p is nan"),
        ({"repetition_penalty": 0.0}, "repetition-penalty is 0.0; it must be above 0"),
        ({"presence_penalty": math.inf}, "presence-penalty is inf"),
        ({"frequency_penalty": math.nan}, "frequency-penalty is nan"),
        ({"logit_bias": ("five=1",)}, "logit-bias 'five=1' is not ID=VALUE"),
        ({"logit_bias": ("5",)}, "logit-bias '5' is not ID=VALUE"),
        ({"logit_bias": ("5=inf",)}, "needs a token id from 0 and a finite number"),
        ({"logit_bias": ("-5=1",)}, "needs a token id from 0 and a finite number"),
        ({"logit_bias": ("5=1", "5=2")}, "logit-bias names token 5 twice"),
        ({"drafter": "oracle"}, "drafter is 'oracle'; it can be head, none"),
        ({"drafter": "ngram", "draft": "stored"}, "draft stored cannot be filled by drafter ngram"),
        ({"drafter": "lookahead", "draft": "chain:4"}, "leave --draft out"),
        ({"drafter": "text:/no/such"}, "there is no file /no/such"),
        ({"drafter": "ngram", "draft": "chain:0"}, "depth is 0"),
        ({"drafter": "ngram", "rule": "typical"}, "typical judges the drafts of a head"),
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
