"""Medusa heads: the formula of spec/medusa.md 1.1, how they begin, their files, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from headsmith.errors import HeadsmithError
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.heads import load_head
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import TREE_FILE, Calibration, LmHead, write_calibration
from headsmith.models.provenance import check_pair
from headsmith.models.target import Target

H, V, VD, K, L = 64, 300, 48, 3, 2
KINDS: list[LmHead] = ["shared", "private", "truncated"]
BLOCKS = {
    f"blocks.{i}.layers.{j}.{name}": shape
    for i in range(K)
    for j in range(L)
    for name, shape in (("weight", [H, H]), ("bias", [H]))
}
SHAPES: dict[LmHead, dict[str, list[int]]] = {
    "shared": BLOCKS | {"lm_head.weight": [V, H]},
    "private": BLOCKS | {f"lm_heads.{i}.weight": [V, H] for i in range(K)},
    "truncated": BLOCKS | {"lm_head.weight": [VD, H], "token_map": [VD]},
}


def last_states(target: Target) -> Tensor:
    ids = torch.randint(0, V, (9,), generator=torch.Generator().manual_seed(4))
    return target.features(ids, [9], ()).last.clone()


def all_logits(head: MedusaHead, target: Target, last: Tensor) -> Tensor:
    """[K, n, V_d]."""
    return torch.stack([head.logits(k, head.state(k, last), target) for k in range(K)])


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_equal_the_plain_formula(
    kind: LmHead, target: Target, make: Callable[..., MedusaHead], draft_ids: Tensor
) -> None:
    head, last = make(kind), last_states(target)
    weights = head.state_dict()
    for k, logits in enumerate(all_logits(head, target, last)):
        x = last
        for j in range(L):
            name = f"blocks.{k}.layers.{j}"
            x = x + F.silu(x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
        own = {
            "shared": target.head_weight,
            "private": weights.get(f"lm_heads.{k}.weight"),
            "truncated": weights.get("lm_head.weight"),
        }[kind]
        assert own is not None
        # 1e-6 of the size of the logits, the rounding of float32.
        torch.testing.assert_close(
            logits, x @ own.T, rtol=0, atol=1e-6 * float(logits.detach().abs().max())
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama-tied", "gemma2"])
def test_at_first_every_head_is_the_next_token_distribution(
    family: str,
    kind: LmHead,
    make_model: Callable[..., PreTrainedModel],
    write_target: Callable[..., Path],
) -> None:
    """Also where the target scales and caps its logits."""
    target = Target.load(write_target(make_model(family)))
    ids = torch.arange(0, 270, 7) if kind == "truncated" else None
    head = MedusaHead.for_target(target, ids, num_heads=K, num_layers=L, lm_head=kind)
    last = target.features(torch.arange(12), [12], ()).last.clone()
    expected = target.logits(last)
    expected = expected if ids is None else expected[:, ids]
    for logits in all_logits(head, target, last):
        torch.testing.assert_close(logits.softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_of_a_fresh_head_gets_a_gradient(
    kind: LmHead, target: Target, make: Callable[..., MedusaHead]
) -> None:
    head, last = make(kind, fresh=True), last_states(target)
    labels = torch.randint(0, VD, (9,), generator=torch.Generator().manual_seed(3))
    losses = [F.cross_entropy(logits, labels) for logits in all_logits(head, target, last)]
    torch.stack(losses).sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm() > 0, name


def test_layers_of_a_block_are_modules_of_their_own(make: Callable[..., MedusaHead]) -> None:
    head = make("shared", fresh=True)
    assert len({id(p) for p in head.parameters()}) == len(BLOCKS)


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_exactly_the_tensors_that_vllm_reads(
    kind: LmHead, make: Callable[..., MedusaHead], draft_ids: Tensor, tmp_path: Path, target: Target
) -> None:
    make(kind).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(t.shape) for name, t in tensors.items()} == SHAPES[kind]
    if kind == "truncated":
        assert torch.equal(tensors["token_map"], draft_ids)
        assert tensors["token_map"].dtype == torch.int64
    if kind == "shared":
        assert torch.equal(tensors["lm_head.weight"], target.head_weight)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "num_heads": K,
        "num_hidden_layers": L,
        "truncated_vocab_size": VD if kind == "truncated" else V,
        "original_lm_head": kind != "private",
        "medusa_fc_bias": True,
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(
    kind: LmHead, target: Target, make: Callable[..., MedusaHead], tmp_path: Path
) -> None:
    head = make(kind)
    head.save(tmp_path)
    again, last = load_head(tmp_path, target), last_states(target)
    assert isinstance(again, MedusaHead) and again.config == head.config
    assert torch.equal(again.draft_ids, head.draft_ids)
    assert torch.equal(all_logits(again, target, last), all_logits(head, target, last))
    assert check_pair(target, tmp_path) == []
    half = tmp_path / "half"
    again.save(half, torch.bfloat16)
    rounded = load_head(half, target, dtype=torch.bfloat16)
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}


def test_a_shared_lm_head_is_no_parameter_and_no_copy(
    target: Target, make: Callable[..., MedusaHead], tmp_path: Path
) -> None:
    head = make("shared")
    head.save(tmp_path)
    again = load_head(tmp_path, target)
    assert isinstance(again, MedusaHead) and again.shared is target.head_weight
    assert {name for name, _ in again.named_parameters()} == set(BLOCKS)


def test_an_eagle_head_is_loaded_as_one(target: Target, tmp_path: Path) -> None:
    Eagle3Head.for_target(target, torch.arange(V)).save(tmp_path)
    assert isinstance(load_head(tmp_path, target), Eagle3Head)


def test_the_stored_tree_comes_along(
    target: Target, make: Callable[..., MedusaHead], tmp_path: Path
) -> None:
    make("shared").save(tmp_path)
    assert load_head(tmp_path, target).calibration is None  # type: ignore[union-attr]
    tree = Calibration([[0], [0, 0]], [[0.5, 0.25], [0.125, 0.0]], {"prompts": "some"})
    write_calibration(tmp_path, tree)
    assert load_head(tmp_path, target).calibration == tree  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ['{"medusa_choices": [[0], ["a"]]}', '{"medusa_choices": []}'])
def test_a_damaged_tree_is_refused(
    text: str, target: Target, make: Callable[..., MedusaHead], tmp_path: Path
) -> None:
    make("shared").save(tmp_path)
    (tmp_path / TREE_FILE).write_text(text)
    with pytest.raises(HeadsmithError, match="holds no medusa_choices.*headsmith calibrate"):
        load_head(tmp_path, target)
