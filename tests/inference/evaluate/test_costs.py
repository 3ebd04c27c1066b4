"""`headsmith profile`: the arithmetic from known times, least work by hand, and whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headsmith.errors import HeadsmithError
from headsmith.inference import machine
from headsmith.inference.costs import Decoded, Watched, cost_model, curve, profile
from headsmith.inference.least import Setting, block_parameters, work_of
from headsmith.inference.profile_cli import profile_
from headsmith.inference.records import Phases, Round
from headsmith.inference.settings import EvalSettings
from headsmith.inference.speed import Chunk
from headsmith.inference.stages import Stages, stage, watching_stages
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small copy and a small product measure little, but quickly."""
    monkeypatch.setitem(machine.BYTES, "cpu", 2**16)
    monkeypatch.setitem(machine.SIDE, "cpu", 16)


class Known(Watched):
    """An arm whose rounds all take the same, in milliseconds."""

    def __init__(
        self, phases: dict[str, float], stages: dict[str, list[float]], tau: float = 1.0
    ) -> None:
        self.phases = phases
        seconds = {name: [ms / 1000 for ms in calls] for name, calls in stages.items()}
        self.stages = Stages(CPU, seconds)
        self.arm = SimpleNamespace(rounds=[None] * 3, committed=3 * tau, passes=3)

    def per_round(self, phase: str) -> float:
        return self.phases[phase]


def test_the_model_is_the_arithmetic_of_the_rounds() -> None:
    plain: Any = Known({"decode_s": 10.0}, {})
    drafted: Any = Known(
        {"decode_s": 17.0, "draft_s": 4.0},
        # One call a round; the slow one is not the median. Two calls a round of the matrix.
        {"target pass": [9.0, 9.0, 50.0], "target lm_head": [1.0] * 6},
        tau=2.55,
    )
    model = cost_model(plain, drafted, steps=4)
    found = {name: model[name] for name in ("c_v", "c_d", "c_o", "break_even")}
    assert found == pytest.approx({"c_v": 1.1, "c_d": 0.1, "c_o": 0.2, "break_even": 1.7})
    assert model["tau"] == pytest.approx(2.55) and model["of"] == "rounds by the host"
    assert model["predicted_speedup"] == pytest.approx(1.5)
    points = curve(model, 2)
    assert [one["tau"] for one in points] == [1, 2, 3]
    assert points[2]["speedup"] == pytest.approx(3 / 1.7)


def test_least_work_by_hand(
    tiny_tokenizer: Any, make_llama: Callable[..., LlamaForCausalLM]
) -> None:
    model = make_llama(seed=1, num_hidden_layers=4, vocab_size=80)
    blocks = sum(p.numel() for p in model.model.layers.parameters()) + 32
    target = Target(model, tiny_tokenizer, "small")
    head = Eagle3Head.for_target(target, torch.arange(40), taps=(0, 1, 2))
    layer = sum(p.numel() for p in head.midlayer.parameters())
    at = Setting(
        rows=5, drafted=2, accepted=1.5, batch=2, context=10, token_bytes=64, head_token_bytes=8
    )

    def bytes_of(name: str, head: object = head) -> float | None:
        work = work_of(name, target, head, at)
        return None if work is None else work.bytes

    # Packed weights count like any others.
    assert bytes_of("target pass") == blocks * 4 + 2 * 10 * 64
    assert bytes_of("target lm_head") == 80 * 32 * 4
    assert bytes_of("verify") == 5 * 80 * 4
    assert bytes_of("compaction") == 2 * 2 * 1.5 * 64
    assert bytes_of("draft layer") == layer * 4 + 2 * 10 * 8
    assert bytes_of("draft input") == (layer + 3 * 32 * 32) * 4 + 2 * 10 * 8
    assert bytes_of("draft lm_head") == 40 * 32 * 4
    assert bytes_of("tree build") is None
    work = work_of("target pass", target, head, at)
    assert work is not None and work.flops == 2 * blocks * 5
    medusa = MedusaHead.for_target(target, num_heads=2)
    own = sum(p.numel() for p in medusa.blocks.parameters())
    assert bytes_of("draft heads", medusa) == (own + 80 * 32) * 4


def test_more_rows_read_more_experts(tiny_tokenizer: Any) -> None:
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=80,
    )
    target = Target(Qwen3MoeForCausalLM(config), tiny_tokenizer, "moe")
    experts = 4 * 8 * 3 * 32 * 16
    one, many = (block_parameters(target, rows) for rows in (1, 1000))
    assert one.touched == one.active == many.active
    assert many.touched - one.touched == pytest.approx(experts * 3 / 4)


def test_stages_are_timed_only_while_watched() -> None:
    stages = Stages(CPU)
    with stage("before"):
        pass
    with watching_stages(stages):
        for _ in range(2):
            with stage("target pass"):
                pass
    with stage("after"):
        pass
    assert list(stages.seconds) == ["target pass"] and len(stages.seconds["target pass"]) == 2


def test_the_machine_is_measured_and_cards_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.measure_machine(CPU, torch.float32)
    assert found["bytes_per_s"] == max(found["copy_bytes_per_s"], found["read_bytes_per_s"]) > 0
    assert found["flops_per_s"] > 0 and found["card"] is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    card = machine.card_of(torch.device("cuda"))
    assert card is not None and card["bytes_per_s"] == 4.8e12


def test_the_model_of_rounds_that_nobody_watches() -> None:
    arms = [Decoded(None, 2) for _ in range(2)]
    for arm, (draft, verify, other) in zip(arms, [(0.0, 9.0, 1.0), (4.0, 11.0, 2.0)], strict=True):
        full = Round(2, Phases(0.0, draft / 1000, verify / 1000, other / 1000))
        # The last request is alone for a while.
        arm.arm.rounds = [full] * 3 + [Round(1, Phases(0.0, 9.0, 9.0, 9.0))]
        arm.arm.chunks = [Chunk(Phases(), committed=51, passes=20)]
    model = cost_model(*arms, steps=4)
    found = {name: model[name] for name in ("plain_ms", "round_ms", "c_v", "c_d", "c_o")}
    wanted = {"plain_ms": 10.0, "round_ms": 17.0, "c_v": 1.1, "c_d": 0.1, "c_o": 0.2}
    assert found == pytest.approx(wanted) and model["tau"] == pytest.approx(2.55)


DRAFTS = {
    "chain:3": {"draft input", "draft layer", "draft lm_head"},
    "tree:6,3,3": {"draft input", "draft layer", "draft lm_head", "tree build"},
}


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_profile_of_a_tiny_head(draft: str, settings: EvalSettings, tmp_path: Path) -> None:
    asked = replace(settings, draft=draft, batch=(1, 2), max_new_tokens=24, out=str(tmp_path / "p"))
    found = profile(asked)
    assert json.loads((tmp_path / "p" / "profile.json").read_text()) == found
    assert [part["batch"] for part in found["batches"]] == [1, 2]
    for part in found["batches"]:
        rows = {row["stage"]: row for row in part["stages"]}
        both = {"target pass", "target lm_head", "verify", "compaction"}
        assert set(rows) == both | DRAFTS[draft] | {"rest"}
        assert {row["stage"] for row in part["plain"]} == both | {"rest"}
        assert rows["target pass"]["calls"] == rows["compaction"]["calls"] == 1
        assert rows["draft input"]["calls"] == 1
        assert rows["draft layer"]["calls"] == 2 and rows["draft lm_head"]["calls"] == 3
        model = part["model"]
        whole = sum(row["ms_per_round"] for row in part["stages"])
        assert whole == pytest.approx(model["round_ms"], rel=0.5)
        assert 0 < rows["target pass"]["roofline"]
        assert rows["target pass"]["bytes_per_s"] > 0 and rows["rest"]["bytes"] is None
        total = model["c_v"] + 3 * model["c_d"] + model["c_o"]
        assert model["break_even"] == pytest.approx(total)
        assert model["predicted_speedup"] == pytest.approx(model["tau"] / total)
        assert [one["tau"] for one in part["curve"]] == [1, 2, 3, 4]
        assert part["kernels"] == []


@pytest.mark.slow
def test_the_command_prints_tables(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, head, prompts = folders
    arguments = [f"--target={target}", f"--head={head}", f"--prompts={prompts}", "--device=cpu"]
    path = tmp_path / "costs.json"
    said = CliRunner().invoke(profile_, [*arguments, "--max-new-tokens=6", f"--json={path}"])
    assert said.exit_code == 0, said.output
    for word in ("drafted: target pass", "plain: rest", "roofline", "c_v", "speedup for tau 1:"):
        assert word in said.output
    assert json.loads(path.read_text())["schema"] == "headsmith.profile/1"
    refused = CliRunner().invoke(profile_, [f"--target={target}", f"--prompts={prompts}"])
    assert refused.exit_code and isinstance(refused.exception, HeadsmithError)


def test_only_heads_are_profiled(settings: EvalSettings) -> None:
    with pytest.raises(HeadsmithError, match="add --head"):
        profile(replace(settings, drafter="ngram", head=None))
