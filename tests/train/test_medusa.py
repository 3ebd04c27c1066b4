"""Medusa heads in training: against the definition row by row, whole runs, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headsmith.data.pack import Row
from headsmith.inference.engine import Decoder
from headsmith.inference.evaluate import quick_steps
from headsmith.inference.metrics import summarise
from headsmith.inference.records import Request
from headsmith.inference.tree import Chain
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import LmHead
from headsmith.models.target import Target
from headsmith.train import medusa
from headsmith.train.loss import LossSettings
from headsmith.train.medusa import medusa_losses
from headsmith.train.predict import walk
from headsmith.train.recipe import TrainSection
from headsmith.train.step import Unroll
from headsmith.train.unroll import prepare_row

K = 3
KINDS: list[LmHead] = ["shared", "private", "truncated"]
LOSSES = [LossSettings("ce"), LossSettings("kl"), LossSettings("mix", ce_weight=0.3)]


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target.load(target_dir, dtype=torch.float64)


def make_head(target: Target, kind: LmHead, size: float = 0.1) -> MedusaHead:
    """Float64 heads of two layers; no weight is zero unless size is."""
    ids = torch.arange(0, target.vocab_size, 2) if kind == "truncated" else None
    head = MedusaHead.for_target(target, ids, num_heads=K, num_layers=2, lm_head=kind).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return head


@pytest.fixture(scope="module")
def row() -> Row:
    """Two documents; in the second a prompt stands in the middle."""
    ids = torch.randint(0, 300, (30,), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(30, dtype=torch.bool)
    mask[[0, 13, 14, 20, 21]] = False
    return Row(ids, mask, [13, 17])


def prepared(head: MedusaHead, target: Target, row: Row) -> Any:
    return prepare_row(target, head.draft_ids, row, (), K)


def loss_of_row(
    head: MedusaHead, target: Target, row: Row, t: int, k: int, loss: LossSettings, last: Tensor
) -> tuple[Tensor, bool]:
    """The loss of one place and one head, written out, and whether its first choice is right."""
    x = last[t]
    for j in range(2):
        x = x + F.silu(head.blocks[k].layers[j](x))
    rows = {
        "shared": lambda: target.head_weight,
        "private": lambda: head.lm_heads[k].weight,
        "truncated": lambda: head.lm_head.weight,
    }[head.config.lm_head]()
    q, ids = (rows @ x).log_softmax(-1), head.draft_ids
    teacher = target.logits(last[t + 1 + k][None])[0]
    total = q.new_zeros(())
    share = {"ce": 1.0, "kl": 0.0}.get(loss.name, loss.ce_weight)
    label = (ids == row.ids[t + 2 + k]).nonzero().flatten().tolist()
    if share and label:
        total = total - share * q[label[0]]
    if share < 1 and int(teacher.argmax()) in ids:
        p = teacher[ids].log_softmax(-1)
        total = total + (1 - share) * (p.exp() * (p - q)).sum()
    return total, int(ids[q.argmax()]) == int(teacher.argmax())


def by_definition(
    head: MedusaHead, target: Target, row: Row, loss: LossSettings
) -> tuple[list[Tensor], list[dict[int, bool]]]:
    """Loss sums of every head and, by row, what was right."""
    last = target.features(row.ids, row.lengths, ()).last.clone()
    documents, mask = row.documents.tolist(), row.mask.tolist()
    sums, rights = [], []
    for k in range(K):
        total, right = torch.zeros((), dtype=torch.float64), {}
        for t in range(len(mask)):
            ahead = range(t + 1, t + k + 3)
            if all(j < len(mask) and mask[j] and documents[j] == documents[t] for j in ahead):
                value, right[t] = loss_of_row(head, target, row, t, k, loss, last)
                total = total + value
        sums.append(total)
        rights.append(right)
    return sums, rights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_losses_and_gradients_are_those_of_the_definition(
    kind: LmHead,
    loss: LossSettings,
    target: Target,
    row: Row,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces of seven rows, with another weight for the loss of each head."""
    monkeypatch.setattr(medusa, "CHUNK", 7)
    head, weights = make_head(target, kind), torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)
    result = medusa_losses(head, target, prepared(head, target, row), K, loss)
    (weights * result.loss_sums).sum().backward()
    found = {name: p.grad for name, p in head.named_parameters()}
    head.zero_grad(set_to_none=True)
    sums, rights = by_definition(head, target, row, loss)
    expected = torch.stack(sums)
    (weights * expected).sum().backward()
    torch.testing.assert_close(result.loss_sums, expected, rtol=1e-9, atol=1e-9)
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm() > 0, name
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-7, atol=1e-9)
    assert result.rows.tolist() == [len(right) for right in rights]
    assert result.correct.tolist() == [sum(right.values()) for right in rights]
    run = [next((k for k in range(K) if not rights[k].get(t, False)), K) for t in sorted(rights[0])]
    assert result.run.tolist() == run


@pytest.mark.parametrize("kind", KINDS)
def test_every_fresh_head_learns_from_its_first_step(
    kind: LmHead, target: Target, row: Row
) -> None:
    head = make_head(target, kind, size=0.0)
    medusa_losses(head, target, prepared(head, target, row), K).loss_sums.sum().backward()
    for k in range(K):
        for name, parameter in head.blocks[k].named_parameters():
            assert parameter.grad is not None and parameter.grad.norm() > 0, (k, name)
    for module in head.own_lm_heads():
        assert module.weight.grad is not None and module.weight.grad.norm() > 0


def test_a_row_too_short_for_the_deeper_heads_trains_the_others(target: Target) -> None:
    head = make_head(target, "private")
    short = Row(torch.arange(4), torch.tensor([0, 1, 1, 1]).bool(), [4])
    result = medusa_losses(head, target, prepared(head, target, short), K)
    assert result.rows.tolist() == [2, 1, 0]
    result.loss_sums.sum().backward()
    # Every weight has a gradient, for ranks exchange them all.
    assert all(p.grad is not None for p in head.parameters())
    assert head.lm_heads[2].weight.grad.norm() == 0 < head.lm_heads[1].weight.grad.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_changes_the_losses_by_its_rounding_only(
    kind: LmHead, target_dir: Path, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bfloat16 target, and autocast on top of it; the heads stay float32."""
    monkeypatch.setattr(medusa, "CHUNK", 7)
    exact = Target.load(target_dir)
    rounded = Target.load(target_dir, dtype=torch.bfloat16)
    results = []
    for target, precision in ((exact, "float32"), (rounded, "float32"), (rounded, "bfloat16")):
        head = make_head(exact, kind).float()
        head.shared = target.head_weight if kind == "shared" else None
        settings = TrainSection.model_validate({"precision": precision})
        model = Unroll(head, target, settings, LossSettings("mix"))
        losses, _, _ = model(prepared(head, target, row), K)
        losses.sum().backward()
        for name, parameter in head.named_parameters():
            assert parameter.grad is not None and parameter.grad.norm() > 0, name
            assert parameter.grad.isfinite().all()
        results.append(losses.detach())
    for losses in results[1:]:
        torch.testing.assert_close(losses, results[0], rtol=0.05, atol=0.1)


def memorised(target: Target, requests: list[Request], tokens: int) -> tuple[MedusaHead, Any]:
    """Heads that know the target's answers by heart, and the row that they learned."""
    answers, _ = Decoder(target, batch=len(requests), max_new_tokens=tokens).generate(requests)
    ids = [torch.tensor([*r.request.prompt_ids, *r.output_ids]) for r in answers]
    masks = [
        torch.arange(len(i)) >= len(r.request.prompt_ids) for i, r in zip(ids, answers, strict=True)
    ]
    row = Row(torch.cat(ids), torch.cat(masks), [len(i) for i in ids])
    head = MedusaHead.for_target(target, num_heads=K, lm_head="private").double()
    optimiser = torch.optim.Adam(head.parameters(), lr=0.02)
    features = prepared(head, target, row)
    for _ in range(60):
        optimiser.zero_grad()
        medusa_losses(head, target, features, K, LossSettings("ce")).loss_sums.sum().backward()
        optimiser.step()
    return head, features


@pytest.mark.slow
def test_what_is_learned_by_heart_is_accepted_in_decoding(target: Target) -> None:
    """A shift by one place between training and drafting would leave tau near 1 (spec 7.14); and
    the walk over the answers says what the verifier measures.
    """
    generator = torch.Generator().manual_seed(8)
    requests = [
        Request(str(n), "task", torch.randint(0, 256, (n,), generator=generator).tolist())
        for n in (5, 9, 4)
    ]
    head, row = memorised(target, requests, tokens=21)
    with torch.no_grad():
        result = medusa_losses(head, target, row, K)
    assert result.correct.tolist() == result.rows.tolist()
    metrics = summarise(quick_steps(target, head, requests, Chain(K), 21))
    committed, passes = walk(row.rows[0], result.run)
    assert metrics["tau"] == pytest.approx(committed / passes)
    # 20 tokens behind the first in passes of four.
    assert metrics["tau"] == pytest.approx(K + 1)
