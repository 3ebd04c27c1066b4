"""The unroll against an explicit chain per prefix, its mask against the definition, and its
invariances.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headsmith.data.pack import Row
from headsmith.models.eagle3 import Eagle3Head, rotate
from headsmith.models.eagle3_config import Eagle3Config
from headsmith.models.eagle3_init import initialise
from headsmith.models.target import Target
from headsmith.train.loss import KlOverDraftIds, LossSettings, step_loss
from headsmith.train.unroll import TrainRow, loss_rows, prepare_row, unroll, unroll_losses

STEPS = 4


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target.load(target_dir, dtype=torch.float64)


def make_head(target: Target, **flags: bool) -> Eagle3Head:
    draft_ids = torch.arange(0, target.vocab_size, 2)
    config = replace(Eagle3Config.for_target(target, len(draft_ids)), **flags)
    head = Eagle3Head(config, draft_ids)
    initialise(head, target.head_weight[draft_ids], seed=3)
    head.double()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
            elif "lm_head" not in name:
                parameter.mul_(3)
    return head


def make_row(lengths: list[int], starts: list[int], seed: int = 0) -> Row:
    """Documents of these lengths whose trained tokens begin at `starts`."""
    ids = torch.randint(0, 300, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    masks = [torch.arange(n) >= s for n, s in zip(lengths, starts, strict=True)]
    return Row(ids, torch.cat(masks), lengths)


def explicit_chain(
    head: Eagle3Head, target: Target, ids: Tensor, taps: Tensor, row: int, step: int
) -> Tensor:
    """g of `row` at `step`, by decoding the chain from its prefix one token at a time."""
    states = list(head.fuse(taps[: row + 1]))
    entries = [(ids[j + 1], states[j], j) for j in range(row + 1)]
    for k in range(step + 1):
        if k > 0:
            entries.append((ids[row + 1 + k], head.feedback(g), row + k))  # noqa: F821
        g = last_output(head, target, entries)
    return g


def last_output(
    head: Eagle3Head, target: Target, entries: list[tuple[Tensor, Tensor, int]]
) -> Tensor:
    """The layer's output [H] at the last entry; plain softmax over all entries, head by head."""
    layer, d = head.midlayer, head.config.head_dim
    e = target.embed(torch.stack([token for token, _, _ in entries]))
    z = torch.stack([state for _, state, _ in entries])
    u = torch.cat([layer.input_layernorm(e), layer.hidden_norm(z)], -1)
    cos, sin = head.cos_sin(torch.tensor([position for _, _, position in entries]))
    q, k, v = (
        getattr(layer.self_attn, name)(u).view(len(entries), -1, d).transpose(0, 1)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    group = q.shape[0] // k.shape[0]
    out = [
        ((q[h, -1] @ k[h // group].T) / d**0.5).softmax(-1) @ v[h // group]
        for h in range(q.shape[0])
    ]
    residual = layer.hidden_norm(z[-1]) if head.config.norm_before_residual else z[-1]
    r = residual + layer.self_attn.o_proj(torch.cat(out))
    return r + layer.mlp(layer.post_attention_layernorm(r))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True},
    ],
    ids=["eagle3", "eagle3.1", "norms of others"],
)
def test_unroll_equals_an_explicit_chain_with_two_packed_documents(
    target: Target, flags: dict[str, bool]
) -> None:
    head = make_head(target, **flags)
    row = make_row([9, 12], starts=[1, 4])
    prepared = prepare_row(target, head.draft_ids, row, head.taps, STEPS)
    assert prepared.rows[0][0] == 0, "loss starts at the second token of the first document"
    compared = 0
    for step, g in enumerate(unroll(head, target, prepared, STEPS)):
        for index, i in enumerate(prepared.rows[step].tolist()):
            start, end = (0, 9) if i < 9 else (9, 21)
            alone = target.features(row.ids[start:end], [end - start], head.taps)
            expected = explicit_chain(
                head, target, row.ids[start:end], alone.taps.clone(), i - start, step
            )
            assert (g[index] - expected).abs().max() < 1e-10
            compared += 1
    assert compared == sum(len(rows) for rows in prepared.rows) > 30


def test_a_step_that_saw_other_rows_later_keys_would_be_caught(target: Target) -> None:
    """Guards the oracle: mixing two rows' own keys must show up far above the tolerance."""
    head = make_head(target)
    row = make_row([12], starts=[1])
    prepared = prepare_row(target, head.draft_ids, row, head.taps, STEPS)
    right = list(unroll(head, target, prepared, STEPS))
    moved = TrainRow(**{f: getattr(prepared, f) for f in prepared.__dataclass_fields__})
    moved.ids = prepared.ids.roll(1)
    wrong = list(unroll(head, target, moved, STEPS))
    assert (right[1] - wrong[1]).abs().max() > 1e-3


def brute_force(row: Row, steps: int) -> list[list[int]]:
    documents, mask = row.documents.tolist(), row.mask.tolist()

    def counts(i: int, k: int) -> bool:
        ahead = range(i + 1, i + k + 3)
        return all(j < len(mask) and mask[j] and documents[j] == documents[i] for j in ahead)

    return [[i for i in range(len(mask)) if counts(i, k)] for k in range(steps)]


@pytest.mark.parametrize("seed", range(8))
def test_loss_rows_follow_the_definition(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (6,), generator=generator).tolist()
    mask = torch.rand(sum(lengths), generator=generator) < 0.7
    row = Row(torch.zeros(sum(lengths), dtype=torch.long), mask, lengths)
    assert [r.tolist() for r in loss_rows(row, 5)] == brute_force(row, 5)


def test_first_draft_of_an_answer_is_trained_and_nothing_behind_its_end() -> None:
    row = Row(
        torch.zeros(10, dtype=torch.long), torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 0]).bool(), [10]
    )
    assert loss_rows(row, 2)[0].tolist() == [2, 3, 4]
    assert loss_rows(row, 2)[1].tolist() == [2, 3]


def test_a_row_shorter_than_the_unroll_has_no_loss_rows() -> None:
    row = Row(torch.zeros(2, dtype=torch.long), torch.ones(2).bool(), [2])
    assert [len(r) for r in loss_rows(row, 5)] == [0] * 5


@pytest.mark.parametrize("name", ["kl", "lk"])
def test_loss_sums_do_not_depend_on_packing(target: Target, name: str) -> None:
    head, settings = make_head(target), LossSettings(name)  # type: ignore[arg-type]
    lengths, starts = [9, 14, 11], [1, 5, 3]
    packed = make_row(lengths, starts)

    def result(row: Row) -> Tensor:
        prepared = prepare_row(target, head.draft_ids, row, head.taps, STEPS)
        return unroll_losses(head, target, prepared, STEPS, settings).loss_sums.detach()

    apart = torch.zeros(STEPS, dtype=torch.float64)
    begin = 0
    for length in lengths:
        alone = Row(
            packed.ids[begin : begin + length], packed.mask[begin : begin + length], [length]
        )
        apart += result(alone)
        begin += length
    assert torch.allclose(result(packed), apart, rtol=1e-6)


def test_counts_match_a_direct_count(target: Target) -> None:
    head = make_head(target)
    row = make_row([25], starts=[2], seed=5)
    prepared = prepare_row(target, head.draft_ids, row, head.taps, STEPS)
    result = unroll_losses(head, target, prepared, STEPS)
    logits = target.logits(target.features(row.ids, [25], ()).last)
    right = torch.zeros(STEPS, 25, dtype=torch.bool)
    for k, g in enumerate(unroll(head, target, prepared, STEPS)):
        rows = prepared.rows[k]
        drafted = head.draft_ids[head.logits(g).argmax(-1)]
        right[k, rows] = drafted == logits[rows + 1 + k].argmax(-1)
    assert result.correct.tolist() == right.sum(1).tolist()
    assert result.joint_correct.tolist() == right.cumprod(0).sum(1).tolist()
    assert result.run.tolist() == right.cumprod(0).sum(0)[prepared.rows[0]].tolist()
    assert result.rows.tolist() == [len(r) for r in prepared.rows]
    choice = logits[prepared.rows[0] + 1].argmax(-1)
    assert result.covered[0] == torch.isin(choice, head.draft_ids).sum()


def test_kl_gradient_is_that_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: KlOverDraftIds.apply(x, teacher), (logits,))
    expected = torch.nn.functional.kl_div(
        logits.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    assert torch.allclose(KlOverDraftIds.apply(logits, teacher), expected)


def test_rows_whose_first_choice_cannot_be_drafted_do_not_train_kl() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    covered = torch.tensor([True, False, True])
    step_loss(LossSettings("kl"), logits, torch.randn(3, 4), torch.zeros(3), covered).backward()
    assert logits.grad is not None and (logits.grad[1] == 0).all() and (logits.grad[0] != 0).any()


def test_lk_counts_the_mass_that_cannot_be_drafted() -> None:
    """Where the draft ids hold half of the target's probability, no head is accepted more than
    half the time.
    """
    teacher = torch.log(torch.tensor([[0.25, 0.25]]))
    loss = step_loss(
        LossSettings("lk", kl_scale=0.0),
        torch.zeros(1, 2),
        teacher,
        torch.zeros(1),
        torch.tensor([True]),
    )
    assert loss == pytest.approx(0.5)
