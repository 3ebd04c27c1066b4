"""Made-up runs: records with known acceptance, results around them, and folders that hold them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headsmith.inference.advice import advise_all
from headsmith.inference.deciles import compare_deciles
from headsmith.inference.metrics import by_task, equivalents, summarise
from headsmith.inference.records import Pass, Steps

DEPTH = 4


def record(
    id: str, task: str, accepted: Sequence[int], *, depth: int = DEPTH, prompt: int = 9
) -> Steps:
    """A request whose passes accepted these counts of a chain's drafts, uncut."""
    passes = [Pass(depth, a, a + 1, depth) for a in accepted]
    tokens = 1 + sum(one.committed for one in passes)
    return Steps(id, task, prompt, tokens, "length", passes)


def draw_records(
    seed: int,
    conversations: int,
    *,
    task: str = "chat",
    turns: int = 1,
    alpha: float = 0.6,
    spread: float = 0.1,
    more: float = 0.0,
) -> list[Steps]:
    """Conversations of which each has a chance of its own that a draft is accepted, about `alpha`,
    and `more` on top: the same seed gives the same conversations.
    """
    draw = random.Random(seed)
    records = []
    for number in range(conversations):
        chance = min(0.97, max(0.02, draw.gauss(alpha, spread))) + more
        for turn in range(1, turns + 1):
            accepted = []
            for _ in range(draw.randint(15, 25)):
                right = [draw.random() < chance for _ in range(DEPTH)]
                accepted.append((*right, False).index(False))
            name = f"{number}#{turn}" if turns > 1 else str(number)
            records.append(record(name, task, accepted))
    return records


def make_result(
    records: Sequence[Steps], *, batches: Sequence[int] = (1, 4), **setup: Any
) -> dict[str, Any]:
    """A result.json of these records; speeds are made up."""
    overall = summarise(records)
    speed = [
        {
            "batch": batch,
            "baseline_tokens_per_s": 20.0,
            "tokens_per_s": 40.0 / batch,
            "speedup": 2.0 / batch,
            "ttft_ms": {"p50": 100.0, "p95": 120.0},
            "itl_ms": {"p50": 33.0, "p95": 40.0},
            "draft_ms": 10.0,
            "verify_ms": 60.0,
            "other_ms": 0.5,
            "cost_per_token_ms": 25.0 * batch,
            "baseline_cost_per_token_ms": 50.0,
            "pays": batch < 2,
            "peak_memory_bytes": 1_500_000_000,
            "head_bytes": 10_000_000,
            "predicted_speedup": 2.1 / batch,
            "tau": overall["tau"],
            "tau_ci": overall["tau_ci"],
        }
        for batch in batches
    ]
    known = {"drafter": "head", "draft": f"chain:{DEPTH}", "rule": "greedy", "lossless": True}
    known |= {"temperature": 0.0, "seed": 0, "max_new_tokens": 64, "context": [], "stop": []}
    known |= {"prompts": "here.jsonl", "prompts_sha256": "p", "batch": list(batches)}
    return {
        "schema": "headsmith.result/1",
        "command": "headsmith eval --head 'a|b'",
        "created": "2026-01-02T03:04:05+00:00",
        "versions": {"headsmith": "0"},
        "device": {"name": "A CPU of eight cores"},
        "target": {"path": "t", "dtype": "float32", "fingerprint": "sha256:t"},
        "head": {"path": "out/best", "kind": "eagle3"},
        "setup": known | setup,
        "tasks": by_task(records),
        "overall": overall,
        "speed": speed,
        "equality": {
            "checked": 40,
            "exact": 40,
            "ties": 0,
            "fails": 0,
            "compared_to_baseline": 4,
            "identical_to_baseline": 4,
        },
        "lossy": None,
        "equivalents": equivalents(records),
        "advice": advise_all(records),
        "deciles": compare_deciles(records),
        "degenerate": {"answers": 0, "kinds": {}, "which": []},
        "warnings": ["something <to> know"],
    }


@pytest.fixture
def save_run(tmp_path: Path) -> Callable[..., Path]:
    """save_run(name, records, **setup): a folder as `headsmith eval --out` writes it."""

    def save(name: str, records: Sequence[Steps], **setup: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lines = [json.dumps(one.to_json()) + "\n" for one in records]
        (folder / "steps.jsonl").write_text("".join(lines))
        (folder / "result.json").write_text(json.dumps(make_result(records, **setup)))
        return folder

    return save


@pytest.fixture(scope="session")
def one_record() -> Callable[..., Steps]:
    """one_record(id, task, accepted counts): a request."""
    return record


@pytest.fixture(scope="session")
def drawn() -> Callable[..., list[Steps]]:
    """drawn(seed, conversations, task=, turns=, alpha=, spread=, more=): see draw_records."""
    return draw_records


@pytest.fixture(scope="session")
def result_of() -> Callable[..., dict[str, Any]]:
    """result_of(records, batches=, **setup): a result.json of them."""
    return make_result
