"""A Hub on this machine, the real client turned to it, and a head to publish."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headsmith.files import weights_sha256
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.provenance import target_info
from headsmith.models.target import Target

METRICS = {
    "tau": 2.25,
    "tau_ci": [2.0, 2.5],
    "tau_macro": 2.2,
    "acceptance_rate": 0.3125,
    "requests": 12,
    "tokens": 300,
    "passes": 128,
}


def server_module() -> Any:
    path = Path(__file__).parent / "server.py"
    spec = importlib.util.spec_from_file_location("hub_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    import sys

    sys.modules["hub_server"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The server's state; the client reaches it, and nothing else."""
    from huggingface_hub import constants

    module = server_module()
    state, server = module.serve()
    monkeypatch.setenv("HF_ENDPOINT", state.url)
    monkeypatch.setenv("HF_TOKEN", module.TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield state
    server.shutdown()
    server.server_close()


@pytest.fixture
def head(target: Target, tmp_path: Path) -> Path:
    """An EAGLE-3.1 head with the record of a run."""
    folder = tmp_path / "head"
    ids = torch.tensor(sorted({*range(0, 300, 7), *target.always_drafted}))
    one = Eagle3Head.for_target(target, ids, fc_norm=True, norm_output=True)
    one.save(folder)
    about = {
        "schema": "headsmith.head/1",
        "headsmith": "0.1.0",
        "target": target_info(target),
        "head": {**one.about(), "sha256": weights_sha256(folder)},
        "data": {"source": "/data/talk.jsonl", "fingerprint": "sha256:ab", "rows": 600}
        | {"tokens": 75154, "trained_tokens": 38106},
        "recipe": {
            "target": {"path": target.path, "revision": None, "dtype": "float32"},
            "data": {"source": "/data/talk.jsonl", "max_length": 512},
            "validation": {"draft": "chain:4", "max_new_tokens": 48},
            "output": {"dir": "/home/someone/runs/x"},
        },
        "training": {"step": 441, "tokens": 225462},
        "validation": METRICS | {"tau": 1.5, "tau_ci": [1.25, 1.75]},
    }
    (folder / "headsmith.json").write_text(json.dumps(about))
    (folder / "trainer.state").write_bytes(b"what only the trainer needs")
    return folder


@pytest.fixture
def result(head: Path, tmp_path: Path) -> Path:
    """A result.json that measured the head."""
    path = tmp_path / "result.json"
    path.write_text(
        json.dumps(
            {
                "schema": "headsmith.result/1",
                "created": "2026-11-30T01:02:03+00:00",
                "device": {"type": "cpu", "name": "Some CPU | 3 GHz", "threads": 2},
                "target": {"path": "/models/t", "dtype": "bfloat16"},
                "head": {"path": str(head), "sha256": weights_sha256(head)},
                "setup": {
                    "drafter": "head",
                    "rule": "sample",
                    "draft": "tree:12,3,4",
                    "lossless": True,
                    "temperature": 0.7,
                    "max_new_tokens": 128,
                    "template_sha256": "c0ffee" * 8,
                    "system_prompt": None,
                },
                "tasks": {"gsm8k": METRICS, "mt_bench": METRICS | {"tau": 2.5}},
                "overall": METRICS | {"tau": 2.375, "requests": 24},
                "speed": [
                    {"batch": 1, "baseline_tokens_per_s": 20, "tokens_per_s": 30, "speedup": 1.5},
                    {"batch": 4, "baseline_tokens_per_s": None, "speedup": None},
                ],
                "equality": {"checked": 600, "exact": 599, "ties": 1, "fails": 0},
                "warnings": [f"head {head} was seen in /home/someone/x; mind it"],
            }
        )
    )
    return path
