"""`evaluate` and `headsmith eval` on a tiny random target: the files, the words, the exit codes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headsmith.cli import cli, run
from headsmith.errors import EqualityFailed, HeadsmithError
from headsmith.inference import equality
from headsmith.inference.cli import batch_sizes, context_lengths, eval_
from headsmith.inference.equality import Equality
from headsmith.inference.evaluate import EvalSettings, evaluate, quick_tau, raise_if_unequal
from headsmith.inference.metrics import summarise
from headsmith.inference.records import Request, Steps
from headsmith.inference.result import is_degenerate
from headsmith.inference.tree import Chain
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
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
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    return fast


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A target, a head whose lm_head is the target's, and prompts of which one has two turns."""
    root = tmp_path_factory.mktemp("eval")
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=160,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    target = Target.load(root / "target")
    vocabulary = torch.arange(target.vocab_size)
    Eagle3Head.for_target(target, vocabulary).save(root / "head")
    rows = [
        {"prompt": "red green", "task": "colours"},
        {"turns": ["one two", "three"], "task": "numbers"},
        {"prompt": "blue", "task": "colours"},
    ]
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root / "target", root / "head", prompts


@pytest.fixture
def settings(folders: tuple[Path, Path, Path]) -> EvalSettings:
    target, head, prompts = folders
    return EvalSettings(
        target=str(target), head=str(head), prompts=str(prompts), max_new_tokens=8, device="cpu"
    )


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


def arguments(folders: tuple[Path, Path, Path], *more: str) -> list[str]:
    target, head, prompts = folders
    return [
        "eval",
        f"--target={target}",
        f"--head={head}",
        f"--prompts={prompts}",
        "--max-new-tokens=2",
        "--device=cpu",
        *more,
    ]


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
        "equivalents",
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
    assert sorted(path.name for path in out.iterdir()) == [
        "responses.jsonl",
        "result.json",
        "steps.jsonl",
    ]


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
    assert result["device"]["threads"] >= 1 and result["versions"]["torch"] == torch.__version__


def test_second_turn_holds_the_first_answer(measured: Measured) -> None:
    tokenizer = byte_tokenizer()
    by_id = {one["id"]: one for one in lines(measured.out / "responses.jsonl")}
    prompt = tokenizer.decode(by_id["1#2"]["prompt_ids"])
    assert prompt.startswith("<s>user:one two</s><s>assistant:")
    assert prompt.endswith("<s>user:three</s><s>assistant:")
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


def test_quick_tau_is_the_same_tau(measured: Measured, folders: tuple[Path, Path, Path]) -> None:
    target = Target.load(folders[0])
    requests = [
        Request(one["id"], one["task"], one["prompt_ids"])
        for one in lines(measured.out / "responses.jsonl")
    ]
    head = Eagle3Head.load(folders[1], num_target_layers=target.num_layers)
    assert quick_tau(target, head, requests, Chain(3), 8) == measured.result["overall"]


def test_stop_string_ends_answers_and_is_counted(
    measured: Measured, settings: EvalSettings, tmp_path: Path
) -> None:
    answer = lines(measured.out / "responses.jsonl")[0]
    text = byte_tokenizer().decode(answer["output_ids"][4:5])
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


def test_repeating_output_is_told_from_varied_output() -> None:
    assert is_degenerate([5, 6] * 30)
    assert not is_degenerate(list(range(60)))
    assert not is_degenerate([5] * 20), "too short to say"


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
        ({"drafter": "ngram"}, "drafter is 'ngram'; it can be head, none"),
        ({"rule": "typical"}, "rule is 'typical'"),
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


def test_json_on_stdout_is_alone_there(folders: tuple[Path, Path, Path]) -> None:
    outcome = CliRunner().invoke(cli, arguments(folders, "--json", "-", "--batch", "1,2"))
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(outcome.stdout)
    assert result["setup"]["batch"] == [1, 2]
    assert "tau = committed tokens / verification passes" in outcome.stderr.replace("\n", "")


def test_json_to_a_file_leaves_the_table_on_stdout(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    outcome = CliRunner().invoke(cli, arguments(folders, "--json", str(path), "--no-baseline"))
    assert outcome.exit_code == 0, outcome.output
    assert "acceptance" in outcome.stdout
    assert json.loads(path.read_text())["speed"][0]["speedup"] is None


def test_failed_equality_is_exit_code_3_after_everything_is_written(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Equality(24, 23, 0, 1, {"id": "0", "index": 3, "margin": 1.5})
    monkeypatch.setattr(equality, "check_equality", lambda *args, **kwargs: bad)
    path, out = tmp_path / "r.json", tmp_path / "out"
    code = run(cli, arguments(folders, "--json", str(path), "--out", str(out)))
    assert code == 3
    for written in (path, out / "result.json"):
        assert json.loads(written.read_text())["equality"]["fails"] == 1
    with pytest.raises(EqualityFailed, match="1 of 24 output tokens.*fault of the decoder"):
        raise_if_unequal(json.loads(path.read_text()))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--draft=chain:-1"], "depth is -1"),
        (["--batch=two"], "is not a list of batch sizes"),
        (["--target=/no/such/model"], "/no/such/model"),
        (["--prompts=/no/such/prompts.jsonl"], "neither a file nor a task"),
        (["--prompts=gsm8k", "--data-dir=/no/such/folder"], "there is no gsm8k.jsonl"),
        (["--head=/no/such/head"], "there is no head in"),
        (["--system-prompt=" + "long " * 60], "the target's context holds 160"),
    ],
)
def test_mistakes_end_in_one_sentence_and_exit_code_2(
    folders: tuple[Path, Path, Path],
    more: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(cli, arguments(folders, *more)) == 2
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if "headsmith: error:" in line]
    assert len(said) == 1 and sentence in said[0]
    assert "Traceback" not in captured.err


def test_target_is_taken_from_the_head(
    folders: tuple[Path, Path, Path], settings: EvalSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, ["eval", f"--head={folders[1]}", f"--prompts={folders[2]}"]) == 2
    assert "has no headsmith.json that names its target; add --target" in capsys.readouterr().err
