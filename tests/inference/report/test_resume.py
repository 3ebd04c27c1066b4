"""A run that is interrupted goes on: nothing twice, the same result, and times that say so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headsmith.cli import cli, run
from headsmith.errors import HeadsmithError
from headsmith.inference import engine, plots
from headsmith.inference.evaluate import EvalSettings, evaluate
from headsmith.inference.records import Request, Response
from headsmith.inference.resume import UNFINISHED
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

TIMES = {"created", "speed", "warnings", "versions"}


class Interrupting:
    """Counts the requests that decoders really decode; Ctrl-C comes after `after` of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded: list[str] = []
        self.after: int | None = None
        generate = engine.Decoder.generate

        def watched(
            decoder: engine.Decoder,
            requests: Sequence[Request],
            on_response: Callable[[Response], None] | None = None,
        ) -> Any:
            # The warm-up has nobody to tell and is no part of the run.
            if on_response is None:
                return generate(decoder, requests)

            def told(response: Response) -> None:
                on_response(response)
                kind = "plain" if decoder.drafter is None else "drafted"
                self.decoded.append(f"{kind}/{decoder.batch}/{response.request.name}")
                if len(self.decoded) == self.after:
                    raise KeyboardInterrupt

            return generate(decoder, requests, told)

        monkeypatch.setattr(engine.Decoder, "generate", watched)

    def take(self) -> list[str]:
        found, self.decoded = self.decoded, []
        return found


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupting]:
    # Plots take longer than all that is looked at here.
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    yield Interrupting(monkeypatch)


@pytest.fixture(scope="module")
def settings(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> EvalSettings:
    """5 requests of 4 conversations at two batch sizes, drafted and plain: 20 in all."""
    root = tmp_path_factory.mktemp("resume")
    target = Target.load(tiny_target_dir)
    Eagle3Head.for_target(target, torch.arange(target.vocab_size)).save(root / "head")
    rows: list[dict[str, Any]] = [{"prompt": text} for text in ("red", "tea", "milk")]
    rows.insert(1, {"turns": ["one", "two"]})
    (root / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvalSettings(
        target=str(tiny_target_dir),
        head=str(root / "head"),
        prompts=str(root / "p.jsonl"),
        max_new_tokens=4,
        device="cpu",
        batch=(1, 2),
        draft="chain:2",
    )


@pytest.mark.slow
def test_nothing_is_done_twice_and_the_result_is_the_same(
    settings: EvalSettings, decoders: Interrupting, tmp_path: Path
) -> None:
    whole = evaluate(replace(settings, out=str(tmp_path / "whole")))
    everything = decoders.take()
    assert len(everything) == 20
    parts = replace(settings, out=str(tmp_path / "parts"))
    done: list[str] = []
    for after in (3, 9):
        decoders.after = after
        with pytest.raises(KeyboardInterrupt):
            evaluate(parts)
        done += decoders.take()
    # A kill in the middle of a line: what it held is decoded again.
    journal = tmp_path / "parts" / UNFINISHED
    journal.write_bytes(journal.read_bytes() + b'{"arm": "drafted", "bat')
    decoders.after = None
    result = evaluate(parts)
    done += decoders.take()
    assert sorted(done) == sorted(everything)
    assert not journal.exists()
    assert {k: v for k, v in result.items() if k not in TIMES} == {
        k: v for k, v in whole.items() if k not in TIMES
    }
    for name in ("steps.jsonl", "responses.jsonl"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert any("in 3 parts: 12 answers are from before" in line for line in result["warnings"])
    assert not any("parts" in line for line in whole["warnings"])
    for row in result["speed"]:
        assert row["tokens_per_s"] > 0 and row["speedup"] > 0 and row["draft_ms"] > 0
    # Done for good: the next run of these settings begins anew.
    evaluate(parts)
    assert sorted(decoders.take()) == sorted(everything)


@pytest.mark.slow
def test_phases_of_the_parts_sum_to_the_whole(
    settings: EvalSettings, decoders: Interrupting, tmp_path: Path
) -> None:
    decoders.after = 10
    out = replace(settings, out=str(tmp_path), batch=(2,))
    with pytest.raises(KeyboardInterrupt):
        evaluate(out)
    lines = [json.loads(line) for line in (tmp_path / UNFINISHED).read_text().splitlines()]
    requests = [line for line in lines if "request" in line]
    assert len(requests) == 10 and "settings" in lines[0] and lines[1]["part"] == 1
    assert all(min(line["phases"]) >= 0 for line in requests)
    assert all(sum(line["phases"]) > 0 for line in requests if line["batch"] == 1)
    decoders.after = None
    again = evaluate(out)
    assert decoders.take() and again["speed"][0]["tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"draft": "chain:3"}, "draft"),
        ({"rule": "sample", "temperature": 0.5}, "rule, temperature"),
        ({"limit": 2}, "prompts"),
        ({"batch": (1,)}, "batch"),
    ],
)
def test_another_setting_is_refused_by_name(
    change: dict[str, Any],
    name: str,
    settings: EvalSettings,
    decoders: Interrupting,
    tmp_path: Path,
) -> None:
    decoders.after = 3
    out = replace(settings, out=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        evaluate(out)
    kept = (tmp_path / UNFINISHED).read_bytes()
    with pytest.raises(HeadsmithError, match=f"3 finished requests .* with another {name}; go on"):
        evaluate(replace(out, **change))
    assert (tmp_path / UNFINISHED).read_bytes() == kept


def test_a_journal_that_is_none_is_refused(settings: EvalSettings, tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).write_text('{"some": "thing"}\n')
    with pytest.raises(HeadsmithError, match="is not what an interrupted run leaves"):
        evaluate(replace(settings, out=str(tmp_path)))


@pytest.mark.slow
def test_the_command_says_what_is_kept(
    settings: EvalSettings,
    decoders: Interrupting,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [f"--{name}={getattr(settings, name)}" for name in ("target", "head", "prompts")]
    args = ["eval", *options, "--device=cpu", "--max-new-tokens=4", f"--out={tmp_path}"]
    decoders.after = 3
    assert run(cli, args) == 130
    said = capsys.readouterr().err
    assert "3 finished requests are kept in" in said and "headsmith: interrupted" in said
    decoders.after = None
    assert run(cli, args) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "warning: this run is in 2 parts: 3 answers are from before" in words
