"""Every gradient of a training step against the plain computation: all rows at all steps, all
scores, all logits, by autograd.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headsmith.data.pack import Row
from headsmith.models import products
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.eagle3_config import Eagle3Config
from headsmith.models.eagle3_init import initialise
from headsmith.models.target import Target
from headsmith.train.loss import LossSettings, step_loss
from headsmith.train.unroll import prepare_row, unroll_losses

STEPS = 3
WEIGHTS = torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64) / 20


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target.load(target_dir, dtype=torch.float64)


def make_head(target: Target, **flags: bool) -> Eagle3Head:
    config = Eagle3Config.for_target(target, target.vocab_size // 2)
    draft_ids = torch.arange(0, target.vocab_size, 2)
    head = Eagle3Head(replace(config, **flags), draft_ids)  # type: ignore[arg-type]
    initialise(head, target.head_weight[draft_ids], seed=3)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=g)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=g) * 0.1)
    return head


def make_row() -> Row:
    """Three documents with prompts; an answer that stops and begins again."""
    lengths = [14, 30, 11]
    g = torch.Generator().manual_seed(0)
    mask = torch.ones(55, dtype=torch.bool)
    mask[:4] = mask[14:20] = mask[28:33] = mask[44:47] = False
    return Row(torch.randint(0, 300, (55,), generator=g), mask, lengths)


def dense_loss(
    head: Eagle3Head, target: Target, single: Target, row: Row, settings: LossSettings
) -> Tensor:
    """The weighed loss of all steps, on the very states that training reads (`single`): what
    rounding makes of a target's pass is no error of a gradient.
    """
    layer, total, d = head.midlayer, len(row.ids), head.config.head_dim
    features = single.features(row.ids, row.lengths, head.taps)
    taps, last = features.taps.double(), features.last.double()
    places, documents, positions = torch.arange(total), row.documents, row.positions
    hidden = (places > places[:, None]) | (documents != documents[:, None])
    groups = head.config.num_heads // head.config.num_kv_heads
    full = target.logits(last).double()
    covered = torch.isin(full.argmax(-1), head.draft_ids)
    z, keys, values, loss = head.fuse(taps), [], [], torch.zeros((), dtype=torch.float64)
    counts = torch.ones(total, dtype=torch.bool)
    for ahead in range(STEPS + 1):
        ahead_of = places + 1 + ahead
        there = ahead_of < total
        ahead_of = ahead_of.clamp(max=total - 1)
        counts = counts & there & row.mask[ahead_of] & (documents[ahead_of] == documents)
        if ahead == 0:
            continue
        k = ahead - 1
        read = (places + 1 + k).clamp(max=total - 1)
        u = layer.inputs(head.embed(target, row.ids[read]), z)
        q = layer.query(u, *head.cos_sin(positions + k))
        key, value = layer.key_value(u, *head.cos_sin(positions + k))
        keys.append(key.repeat_interleave(groups, 0))
        values.append(value.repeat_interleave(groups, 0))
        scores = [(q @ keys[0].transpose(1, 2)).masked_fill(hidden, -math.inf)]
        scores += [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
        weights = (torch.cat(scores, -1) / math.sqrt(d)).softmax(-1)
        out = weights[..., :total] @ values[0]
        for j, own in enumerate(values[1:]):
            out = out + weights[..., total + j, None] * own
        g = layer.output(z, out)
        z = head.feedback(g)
        logits = head.logits(g)[counts]
        said = full[read[counts]]
        rows = said[:, head.draft_ids], said.logsumexp(-1), covered[read[counts]]
        loss = loss + WEIGHTS[k] * step_loss(settings, logits, *rows)
    return loss


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}], ids=["3", "3.1"])
@pytest.mark.parametrize("name", ["kl", "lk"])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_every_gradient_is_that_of_the_dense_computation(
    target: Target,
    target_dir: Path,
    flags: dict[str, bool],
    name: str,
    library: str,
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
) -> None:
    monkeypatch.setenv(products.VARIABLE, library)
    monkeypatch.setattr(products, "_LEAST", 1)
    monkeypatch.setattr(products, "_DEEP", 1)
    settings, row = LossSettings(name), make_row()  # type: ignore[arg-type]
    head, single = make_head(target, **flags), Target.load(target_dir)
    prepared = prepare_row(single, head.draft_ids, row, head.taps, STEPS)
    weights = WEIGHTS.float()
    found = unroll_losses(head, single, prepared, STEPS, settings, weights)
    (found.loss_sums * weights).sum().backward()
    made = {n: p.grad for n, p in head.named_parameters()}
    head.zero_grad()
    head.double()
    loss = dense_loss(head, target, single, row, settings)
    loss.backward()
    assert float((found.loss_sums * weights).sum()) == pytest.approx(float(loss), rel=1e-5)
    for parameter, exact in head.named_parameters():
        grad = made[parameter]
        assert grad is not None and exact.grad is not None, parameter
        assert grad.dtype == torch.float32
        off = (grad - exact.grad).abs().max() / exact.grad.abs().max()
        assert off < 1e-5, f"{parameter} is off by {float(off):.1e}"
