"""`evaluate` on a tiny random target: what is measured, and the files that say it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from headsmith.inference.evaluate import EvalSettings, evaluate, quick_steps, raise_if_unequal
from headsmith.inference.metrics import summarise
from headsmith.inference.plots import can_plot
from headsmith.inference.records import Request, Steps
from headsmith.inference.report import print_report
from headsmith.inference.tree import Chain
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

METRICS = {
    "tau",
    "tau_ci",
    "tau_macro",
    "acceptance_rate",
    "per_position",
    "conditional",
    "histogram",
    "requests",
    "tokens",
    "passes",
    "zero_accept_fraction",
    "truncated",
    "nodes_per_token",
}
SPEED = {
    "batch",
    "baseline_tokens_per_s",
    "tokens_per_s",
    "speedup",
    "ttft_ms",
    "itl_ms",
    "draft_ms",
    "verify_ms",
    "other_ms",
    "cost_per_token_ms",
    "baseline_cost_per_token_ms",
    "pays",
    "peak_memory_bytes",
    "head_bytes",
    "predicted_speedup",
    "tau",
    "tau_ci",
}
REPORT = {"summary.md", "acceptance.csv", "speed.csv", "report.html"}
PLOTS = {"positions.png", "histogram.png", "depth.png", "batch.png", "speedup.png"}


@dataclass
class Measured:
    """One evaluation that several tests look at."""

    result: dict[str, Any]
    out: Path
    progress: list[tuple[int, int]]


@pytest.fixture(scope="module")
def measured(
    folders: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Measured:
    target, head, prompts = map(str, folders)
    out = tmp_path_factory.mktemp("measured") / "deep" / "out"
    settings = EvalSettings(
        target=target,
        head=head,
        prompts=prompts,
        max_new_tokens=8,
        device="cpu",
        batch=(1, 3),
        draft="chain:3",
        out=str(out),
        command="me",
    )
    progress: list[tuple[int, int]] = []
    result = evaluate(settings, lambda done, total, label: progress.append((done, total)))
    return Measured(result, out, progress)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_result_has_the_schema_and_the_files_agree(measured: Measured) -> None:
    result, out = measured.result, measured.out
    assert result["schema"] == "headsmith.result/1" and result["command"] == "me"
    assert list(result) == [
        "schema",
        "command",
        "created",
        "versions",
        "device",
        "target",
        "head",
        "setup",
        "tasks",
        "overall",
        "speed",
        "equality",
        "distribution",
        "lossy",
        "equivalents",
        "advice",
        "deciles",
        "degenerate",
        "warnings",
    ]
    assert set(result["tasks"]) == {"colours", "numbers"}
    for metrics in (result["overall"], *result["tasks"].values()):
        assert set(metrics) == METRICS
    assert [set(row) for row in result["speed"]] == [SPEED, SPEED]
    assert [row["batch"] for row in result["speed"]] == [1, 3]
    assert result["overall"]["requests"] == 4
    assert len(result["overall"]["per_position"]) == 3
    # 4 requests, two batch sizes, each drafted and plain.
    assert measured.progress == [(done, 16) for done in range(1, 17)]
    assert json.loads((out / "result.json").read_text()) == result
    steps = [Steps.from_json(line) for line in lines(out / "steps.jsonl")]
    assert summarise(steps) == result["overall"]
    assert [one.id for one in steps] == ["0", "1#1", "2", "1#2"]
    answers = lines(out / "responses.jsonl")
    assert [len(one["output_ids"]) for one in answers] == [one.output_tokens for one in steps]
    raw = {"responses.jsonl", "result.json", "steps.jsonl"}
    drawn = PLOTS if can_plot() else set()
    assert {path.name for path in out.iterdir()} == raw | REPORT | drawn


def test_output_is_the_targets_own(measured: Measured) -> None:
    result = measured.result
    assert result["equality"]["fails"] == 0 and result["equality"]["ties"] == 0
    assert result["equality"]["checked"] == result["equality"]["exact"] > 0
    assert result["equality"]["identical_to_baseline"] == 8
    assert result["equality"]["compared_to_baseline"] == 8
    raise_if_unequal(result)
    overall = result["overall"]
    committed = overall["tokens"] - overall["requests"]
    assert overall["tau"] == pytest.approx(committed / overall["passes"])


def test_target_and_head_are_described(
    measured: Measured, folders: tuple[Path, Path, Path]
) -> None:
    result = measured.result
    model = LlamaForCausalLM.from_pretrained(folders[0])
    assert result["target"]["parameters"] == sum(one.numel() for one in model.parameters())
    assert result["target"]["fingerprint"].startswith("sha256:")
    head = result["head"]
    assert (head["kind"], head["taps"]) == ("eagle3", [2, 3, 4])
    assert head["draft_vocab"] == model.config.vocab_size
    assert len(head["sha256"]) == 64 and head["parameters"] > 0
    assert result["setup"]["template_sha256"] and result["setup"]["temperature"] == 0.0
    assert result["setup"]["lossless"] and result["lossy"] is None
    assert result["device"]["threads"] >= 1 and result["versions"]["torch"] == torch.__version__
    assert result["device"]["kernels"] == "none, plain PyTorch"


def test_second_turn_holds_the_first_answer(measured: Measured, tiny_tokenizer: Any) -> None:
    by_id = {one["id"]: one for one in lines(measured.out / "responses.jsonl")}
    prompt = tiny_tokenizer.decode(by_id["1#2"]["prompt_ids"])
    assert prompt.startswith("<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.endswith("<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n")
    assert by_id["1#1"]["text"] in prompt


def test_plain_decoding_needs_no_head(settings: EvalSettings) -> None:
    result = evaluate(replace(settings, drafter="none", head=None))
    assert result["head"] is None and result["setup"]["draft"] is None
    assert result["overall"]["tau"] == 1.0 and result["overall"]["per_position"] == []
    assert result["speed"][0]["tokens_per_s"] > 0 and result["speed"][0]["pays"] is None
    assert result["equality"]["fails"] == 0


def test_without_the_baseline(settings: EvalSettings) -> None:
    result = evaluate(replace(settings, baseline=False))
    row = result["speed"][0]
    assert row["tokens_per_s"] > 0 and row["draft_ms"] > 0
    assert row["speedup"] is None and row["pays"] is None
    assert result["equality"]["compared_to_baseline"] == 0


def test_quick_steps_give_the_tau(measured: Measured, folders: tuple[Path, Path, Path]) -> None:
    target = Target.load(folders[0])
    requests = [
        Request(one["id"], one["task"], one["prompt_ids"])
        for one in lines(measured.out / "responses.jsonl")
    ]
    head = Eagle3Head.load(folders[1], num_target_layers=target.num_layers)
    steps = quick_steps(target, head, requests, Chain(3), 8)
    assert summarise(steps) == measured.result["overall"]


def test_stop_string_ends_answers_and_is_counted(
    measured: Measured, settings: EvalSettings, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    answer = lines(measured.out / "responses.jsonl")[0]
    text = tiny_tokenizer.decode(answer["output_ids"][4:5])
    evaluate(replace(settings, out=str(tmp_path), stop=(text,), limit=1, baseline=False))
    (stopped,) = lines(tmp_path / "responses.jsonl")
    assert stopped["finish_reason"] == "stop" and len(stopped["output_ids"]) <= 5


def test_a_tree_drafts_and_keeps_the_text(measured: Measured, settings: EvalSettings) -> None:
    result = evaluate(replace(settings, draft="tree:6,2,2", limit=2))
    assert len(result["overall"]["per_position"]) == 2
    assert result["overall"]["nodes_per_token"] > 2
    equality = result["equality"]
    assert equality["fails"] == 0
    assert equality["identical_to_baseline"] == equality["compared_to_baseline"] == 3


def test_sampling_is_lossless_and_repeats(settings: EvalSettings, tmp_path: Path) -> None:
    sampling = replace(settings, rule="sample", temperature=0.7, seed=3, batch=(1, 2))
    result = evaluate(replace(sampling, out=str(tmp_path / "a")))
    equality = result["equality"]
    assert equality["fails"] == 0 and equality["exact"] == equality["checked"] > 0
    assert equality["identical_to_baseline"] == equality["compared_to_baseline"] == 8
    assert result["lossy"] is None and result["setup"]["lossless"]
    evaluate(replace(sampling, out=str(tmp_path / "b"), draft="tree:6,2,2", batch=(1,)))
    evaluate(replace(sampling, out=str(tmp_path / "c"), seed=4, batch=(1,)))
    written = [lines(tmp_path / run / "responses.jsonl") for run in "abc"]
    a, b, c = ([one["output_ids"] for one in answers] for answers in written)
    assert a == b != c


def test_typical_acceptance_says_what_it_costs(
    settings: EvalSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    lax = replace(settings, rule="typical", temperature=1.5, posterior_threshold=0.001)
    result = evaluate(lax)
    raise_if_unequal(result)
    lossy = result["lossy"]
    assert result["equality"] is None and not result["setup"]["lossless"]
    assert lossy["tokens"] == result["overall"]["tokens"] and lossy["compared_to_greedy"] == 4
    assert lossy["first_choice"] < 1 and lossy["same_as_greedy_until"] < 1
    assert lossy["mean_log_likelihood"] < lossy["greedy_mean_log_likelihood"]
    assert result["overall"]["tau"] > evaluate(settings)["overall"]["tau"]
    print_report(result, Console(width=200))
    said = capsys.readouterr().out
    assert "LOSSY (typical)" in said and "typical at temperature 1.5, lossy" in said
    assert "equality" not in said
    alone = evaluate(replace(lax, baseline=False))["lossy"]
    assert alone["compared_to_greedy"] == 0 and alone["same_as_greedy_until"] is None


def test_later_turn_that_no_longer_fits_is_left_out_with_a_warning(
    settings: EvalSettings, tmp_path: Path
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"turns": ["short", "y" * 130]}) + "\n" + '{"prompt": "z"}\n')
    result = evaluate(replace(settings, prompts=str(path), max_new_tokens=4, baseline=False))
    assert result["overall"]["requests"] == 2
    assert any("left out: prompt 0#2 of long is" in warning for warning in result["warnings"])


def test_few_conversations_are_warned_of(settings: EvalSettings) -> None:
    warnings = evaluate(replace(settings, max_new_tokens=1))["warnings"]
    assert any("rests on 3 conversations" in warning for warning in warnings)
