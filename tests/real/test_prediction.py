"""What the unroll says of a head is what the verifier measures on the same prompts."""

import json
from pathlib import Path

import pytest
import torch

from headsmith.data.pack import Row
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target
from headsmith.train.predict import walk
from headsmith.train.unroll import prepare_row, unroll_losses

DEPTH = 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle31-native", "eagle31-speculators"])
def test_unroll_predicts_tau(name: str, target_dir: Path, shared_dir: Path) -> None:
    """The reference engine's passes over 12 prompts, from teacher-forced accuracies alone."""
    target = Target.load(target_dir)
    head = Eagle3Head.load(shared_dir / "golden" / name, num_target_layers=target.num_layers)
    trace = json.loads((shared_dir / "golden" / name / "trace.json").read_text())
    committed = passes = measured_passes = 0
    for request in trace["requests"]:
        prompt, output = request["prompt_ids"], request["output_ids"]
        ids = torch.tensor([*prompt, *output])
        row = Row(ids, torch.arange(len(ids)) >= len(prompt), [len(ids)])
        prepared = prepare_row(target, head.draft_ids, row, head.taps, DEPTH)
        with torch.no_grad():
            result = unroll_losses(head, target, prepared, DEPTH)
        new, made = walk(prepared.rows[0], result.run)
        committed, passes = committed + new, passes + made
        # The proposal made after the last token is never verified.
        measured_passes += sum(s["committed"] < len(output) for s in request["steps"])
    measured = committed / measured_passes - 1
    assert committed / passes - 1 == pytest.approx(measured, rel=0.05)
