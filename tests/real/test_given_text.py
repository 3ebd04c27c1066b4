"""An edit of five percent of the words: the real target commits over five tokens a pass."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from headsmith.inference.engine import Decoder
from headsmith.inference.metrics import summarise
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.tree import Chain
from headsmith.models.target import Target

COUNT, NEW_TOKENS = 6, 96


@pytest.mark.slow
def test_tau_of_an_edit(target_dir: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(root / "benchmarks")
    benchmark = importlib.import_module("given_text")
    target = Target.load(target_dir)
    builder = RequestBuilder(target.tokenizer, target.max_context)
    asked = [builder.build(one) for one in load_prompts("default", limit=COUNT)]
    plain, _ = Decoder(target, batch=COUNT, max_new_tokens=NEW_TOKENS).generate(asked)
    requests = benchmark.edits(target, plain, 5, seed=0)
    assert all(one.given_ids != its.output_ids for one, its in zip(requests, plain, strict=True))
    _, drafted = benchmark.measure(target, requests, Chain(16), NEW_TOKENS, 1)
    assert [one.output_ids for one in drafted.responses] == [one.output_ids for one in plain]
    tau = summarise(drafted.responses)["tau"]
    assert tau is not None and tau > 5
