"""The speculators package itself loads what is exported for it, and computes the head's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.formats.check import chain
from headsmith.models.formats.export import export
from headsmith.models.target import Target

pytest.importorskip("speculators", reason="the speculators package is not installed")

STEPS, ROWS = 3, 12


def package_logits(
    folder: Path, taps: torch.Tensor, tokens: torch.Tensor, embeddings: torch.Tensor
) -> torch.Tensor:
    """Logits [STEPS, ROWS, V_d] of the package's own model, each step with the given tokens."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config).eval().float()
    with torch.no_grad():
        # Not in the export: whoever serves the head takes the target's, and the package, without a
        # target to look at, whatever lay in memory.
        model.embed_tokens.weight.copy_(embeddings)
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    with torch.no_grad():
        model(
            hidden_states=taps.flatten(1)[None],
            input_ids=tokens[None],
            document_ids=torch.zeros(1, len(tokens), dtype=torch.long),
            ttt_steps=STEPS,
        )
    return torch.stack(seen)


@pytest.mark.slow
@pytest.mark.parametrize("taps", [None, (1, 3, 6)])
@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}])
def test_the_package_computes_the_heads_logits(
    flags: dict[str, bool], taps: Any, tiny_target_dir: Path, tmp_path: Path
) -> None:
    target = Target.load(tiny_target_dir)
    head = Eagle3Head.for_target(target, torch.arange(7, 55), taps=taps, seed=3, **flags)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    head.save(tmp_path / "head")
    export(tmp_path / "head", "speculators", tmp_path / "out", target=str(tiny_target_dir))

    ids = torch.randint(300, (ROWS + 1,), generator=torch.Generator().manual_seed(4))
    tapped = target.features(ids, [ROWS + 1], head.taps).taps[:-1].clone()
    tokens = ids[1:]
    embeddings = target.model.get_input_embeddings().weight
    theirs = package_logits(tmp_path / "out", tapped, tokens, embeddings)
    for row in range(ROWS - STEPS):
        forced = tokens[row + 1 : row + STEPS].tolist()
        ours, _ = chain(
            head, tapped[: row + 1], tokens[: row + 1], STEPS, target.embed, forced=forced
        )
        torch.testing.assert_close(theirs[:, row], ours, rtol=0, atol=1e-4)
