"""Features that vLLM computes are those of transformers, on the real target.

Needs an environment of vLLM in HEADSMITH_VLLM_PYTHON (`make test-vllm` makes one).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from headsmith.train.capture import Backend, capture
from headsmith.train.recipe import load_recipe

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_gives_the_features_of_transformers(
    target_dir: Path, tmp_path: Path, dtype: str
) -> None:
    python = os.environ.get("HEADSMITH_VLLM_PYTHON")
    if not python:
        pytest.skip("no environment of vLLM: set HEADSMITH_VLLM_PYTHON (make test-vllm)")
    recipe = load_recipe(
        "quickstart/eagle3",
        [
            f"target.path={target_dir}",
            f"target.dtype={dtype}",
            "data.max_rows=8",
            "data.max_length=256",
            "data.row_tokens=256",
            "validation.holdout=0",
            f"data.prepared_dir={tmp_path / 'prepared'}",
        ],
    )
    stored = "float32" if dtype == "float32" else "bfloat16"
    own = capture(recipe, tmp_path / "own", stored, 256)
    theirs = capture(recipe, tmp_path / "theirs", stored, 256, Backend("vllm", python))
    # Relative to the mean size of what is compared; a bfloat16 pass rounds in every block.
    bound = 1e-4 if dtype == "float32" else 0.02
    for row in own.shard_of:
        some, others = own.read(row), theirs.read(row)
        for name in ("taps", "last"):
            gap = (some[name].float() - others[name].float()).abs()
            # By token and tap: the first token of a text is hundreds of times louder.
            size = some[name].float().abs().mean(-1)
            assert (gap.mean(-1) / size).max() < bound, (row, name)
        agreed = (some["choice"] == others["choice"]).float().mean()
        assert agreed == 1 if dtype == "float32" else agreed > 0.95
        torch.testing.assert_close(
            others["logsumexp"],
            some["logsumexp"],
            rtol=1e-4 if dtype == "float32" else 0.02,
            atol=0,
        )
