"""Medusa heads in training: against the definition row by row, whole runs, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headsmith.data.pack import Row
from headsmith.errors import HeadsmithError
from headsmith.inference.engine import Decoder
from headsmith.inference.evaluate import quick_tau
from headsmith.inference.records import Request
from headsmith.inference.tree import Chain
from headsmith.models.heads import load_head
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import LmHead
from headsmith.models.target import Target
from headsmith.train import medusa
from headsmith.train.kinds import loss_settings
from headsmith.train.loop import train
from headsmith.train.loss import LossSettings
from headsmith.train.medusa import medusa_losses
from headsmith.train.plan import make_plan
from headsmith.train.predict import walk
from headsmith.train.recipe import Recipe, TrainSection, load_recipe
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
    return prepare_row(target, head.draft_ids, row, (), K, reads_last=True)


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
    metrics = quick_tau(target, head, requests, Chain(K), 21)
    committed, passes = walk(row.rows[0], result.run)
    assert metrics["tau"] == pytest.approx(committed / passes)
    # 20 tokens behind the first in passes of four.
    assert metrics["tau"] == pytest.approx(K + 1)


MEDUSA = ("head.kind=medusa", "head.num_heads=3", "head.draft_vocab_size=null")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("head.lm_head=private", "head.loss=mix"),
        ("head.lm_head=truncated", "head.draft_vocab_size=64", "head.loss=ce"),
    ],
    ids=KINDS,
)
def test_a_run_lowers_the_loss_and_leaves_a_head_that_loads(
    overrides: tuple[str, ...], recipe_file: Path, tmp_path: Path, target_dir: Path
) -> None:
    quick = ("train.epochs=3", "validation.limit=2", "validation.times=1", "train.unroll_growth=.5")
    recipe = load_recipe(str(recipe_file), [*MEDUSA, *quick, *overrides])
    best = train(recipe)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert all(len(line["losses"]) == 3 for line in lines), "no growth: all heads from the start"
    for k in range(3):
        first, last = lines[0]["losses"][k], lines[-1]["losses"][k]
        assert last < 0.95 * first, (k, first, last)
    assert lines[-1]["predicted_tau"] >= 1
    about = json.loads((best / "headsmith.json").read_text())
    assert about["head"]["kind"] == "medusa" and about["head"]["num_heads"] == 3
    assert about["head"]["lm_head"] == recipe.head.lm_head
    assert about["validation"]["tau"] >= 1
    head = load_head(best, Target.load(target_dir))
    assert isinstance(head, MedusaHead) and head.config.lm_head == recipe.head.lm_head


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(
    recipe_file: Path, tmp_path: Path, metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    def run(folder: str, *more: str) -> list[dict[str, Any]]:
        given = [*MEDUSA, "validation.holdout=0", "output.save_every=2", "data.max_rows=12"]
        out = f"output.dir={tmp_path / folder}"
        train(load_recipe(str(recipe_file), [*given, "train.max_steps=4", out, *more]))
        return metrics(tmp_path / folder)

    whole = run("whole")
    run("parts")
    for name in ("step-000004", "latest"):
        path = tmp_path / "parts" / name
        path.rename(tmp_path / f"gone-{name}")
    assert run("parts") == whole


def test_the_plan_counts_what_is_trained(recipe_file: Path) -> None:
    block = 64 * 64 + 64
    for overrides, lm_heads in (
        ((), 0),
        (("head.lm_head=private",), 3 * 300 * 64),
        (("head.lm_head=truncated", "head.draft_vocab_size=64"), 64 * 64),
    ):
        plan = make_plan(load_recipe(str(recipe_file), [*MEDUSA, *overrides]))
        assert plan.head_body == 3 * block and plan.head_trained == 3 * block + lm_heads
        assert plan.taps == () and plan.corpus.batches.num_steps == 3
        assert all(size > 0 for size in plan.memory.values())
        copy = 0 if lm_heads else 4 * 300 * 64
        assert plan.checkpoint == 12 * plan.head_trained + copy


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["head.taps=[1, 2]"], "head.taps means nothing for head.kind medusa; leave it out"),
        (["head.norm_output=true"], "head.norm_output means nothing for head.kind medusa"),
        (["train.loss=lk"], "train.loss means nothing for head.kind medusa; set head.loss"),
        (["train.kl_scale=2"], "train.kl_scale means nothing for head.kind medusa"),
        (["head.draft_vocab_size=64"], "means nothing for head.lm_head shared, which drafts every"),
        (["head.lm_head=truncated"], "truncated needs head.draft_vocab_size"),
        (["head.ce_weight=0.2"], "head.ce_weight is the share of ce in head.loss mix"),
        (["head.num_heads=0"], "head.num_heads is 0, but must be greater"),
        (["head.kind=eagle3"], "head.num_heads means nothing for head.kind eagle3; leave it out"),
        (["head.kind=eagle3", "head.num_heads=5", "head.loss=ce"], "eagle3; set train.loss"),
        (["head.kind=medusa2"], "head.kind is \"medusa2\", but must be 'eagle3'"),
    ],
)
def test_keys_that_mean_nothing_are_refused(
    recipe_file: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(HeadsmithError) as caught:
        load_recipe(str(recipe_file), [*MEDUSA, *overrides])
    text = str(caught.value)
    assert said in text and "\n" not in text
    assert text.startswith((f"{recipe_file}: ", "command line: "))


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("chain:4", "validation.draft: chain:4 goes 4 drafts deep and head.num_heads is 3"),
        ("tree:8,2,3", "tree:8,2,3 cannot be drafted by a head of kind medusa in training; take a"),
        ("stored", "validation.draft: stored cannot be drafted by a head of kind medusa"),
        ("medusa:8", "validation.draft: medusa:8 cannot be drafted by a head of kind medusa"),
    ],
)
def test_a_draft_that_the_heads_cannot_make_is_refused_before_training(
    draft: str, said: str, recipe_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(HeadsmithError) as caught:
        train(load_recipe(str(recipe_file), [*MEDUSA, f"validation.draft={draft}"]))
    assert said in str(caught.value) and not (tmp_path / "out").exists()


def test_a_recipe_written_out_in_full_is_read_again(recipe_file: Path) -> None:
    for overrides in ((), MEDUSA):
        recipe = load_recipe(str(recipe_file), overrides)
        assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_the_loss_comes_from_the_section_of_the_kind(recipe_file: Path) -> None:
    eagle = load_recipe(str(recipe_file), ["train.loss=lk", "train.kl_decay=2"])
    assert loss_settings(eagle) == LossSettings("lk", kl_decay=2)
    mixed = load_recipe(str(recipe_file), [*MEDUSA, "head.loss=mix", "head.ce_weight=0.25"])
    assert loss_settings(mixed) == LossSettings("mix", ce_weight=0.25)


def test_the_quickstart_recipes_differ_in_the_head_and_the_folder() -> None:
    eagle, medusa_ = (load_recipe(f"quickstart/{name}") for name in ("eagle3", "medusa"))
    assert medusa_.head.kind == "medusa" and medusa_.output.dir != eagle.output.dir
    exclude = {"head", "output"}
    assert medusa_.model_dump(exclude=exclude) == eagle.model_dump(exclude=exclude)


@pytest.mark.slow
def test_starting_from_another_kind_of_head_is_refused(
    recipe_file: Path, tmp_path: Path, target: Target
) -> None:
    make_head(target, "shared").float().save(tmp_path / "three")
    given = ["validation.holdout=0", f"head.init_from={tmp_path / 'three'}"]
    with pytest.raises(HeadsmithError, match="of kind medusa and head.kind is eagle3"):
        train(load_recipe(str(recipe_file), given))
    with pytest.raises(HeadsmithError, match="holds 3 Medusa heads and head.num_heads is 4"):
        train(load_recipe(str(recipe_file), [*MEDUSA, "head.num_heads=4", *given]))
