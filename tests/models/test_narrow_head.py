"""A head narrower than its target: sizes, its own embedding table, files, text; and what is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from headsmith.errors import HeadsmithError
from headsmith.inference.drafters import EagleDrafter
from headsmith.inference.engine import Decoder
from headsmith.inference.records import Request
from headsmith.inference.tree import parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.eagle3_init import narrowed
from headsmith.models.provenance import check_pair
from headsmith.models.target import Target

TAPS = (1, 3, 5)
DRAFT_IDS = torch.arange(3, 253)


@pytest.fixture
def target(write_target: Callable[..., Path], make_model: Callable[..., PreTrainedModel]) -> Target:
    return Target.load(write_target(make_model("llama")))


def narrow(target: Target, **sizes: int) -> Eagle3Head:
    return Eagle3Head.for_target(target, DRAFT_IDS, taps=TAPS, **{"hidden_size": 16, **sizes})


def test_sizes_follow_the_width(target: Target) -> None:
    config = narrow(target).config
    assert (config.hidden_size, config.target_hidden_size, config.intermediate_size) == (16, 32, 24)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (2, 2, 8)
    given = narrow(target, num_heads=8, num_kv_heads=4, head_dim=4, intermediate_size=40).config
    assert (given.num_heads, given.num_kv_heads, given.head_dim) == (8, 4, 4)
    assert given.intermediate_size == 40
    # By its share it would have three heads, which do not divide 22.
    assert narrow(target, hidden_size=22).config.num_heads == 2
    assert narrow(target, num_heads=1).config.num_kv_heads == 1


def test_other_sizes_at_the_targets_width_need_no_table(target: Target) -> None:
    head = Eagle3Head.for_target(target, DRAFT_IDS, taps=TAPS, num_heads=2, intermediate_size=64)
    assert head.embed_tokens is None and head.config.target_hidden_size is None
    assert head.midlayer.self_attn.q_proj.weight.shape == (16, 64)


def test_the_table_keeps_the_most_of_the_targets_embeddings(target: Target) -> None:
    head = narrow(target)
    assert head.embed_tokens is not None
    table = head.embed_tokens.weight
    assert table.shape == (270, 16) and table.dtype == torch.float32 and not table.requires_grad
    whole = target.model.get_input_embeddings().weight
    # What a singular value decomposition keeps at that rank.
    most = torch.linalg.svdvals(whole)[:16].square().sum()
    torch.testing.assert_close(table.square().sum(), most, rtol=1e-4, atol=0)
    ids = torch.tensor([5, 5, 269])
    assert torch.equal(head.embed(target, ids), table[ids])


def test_narrowed_rows_keep_their_inner_products_at_full_width() -> None:
    rows = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(narrowed(rows, 6) @ narrowed(rows, 6).T, rows @ rows.T)


def test_it_is_written_and_read(target: Target, tmp_path: Path) -> None:
    head = narrow(target)
    head.save(tmp_path / "head")
    again = Eagle3Head.load(tmp_path / "head", num_target_layers=target.num_layers)
    assert again.config == head.config
    assert again.embed_tokens is not None and head.embed_tokens is not None
    assert torch.equal(again.embed_tokens.weight, head.embed_tokens.weight)
    for (name, first), second in zip(head.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(first, second), name
    assert check_pair(target, tmp_path / "head") == []


def test_without_its_table_it_is_refused(target: Target, tmp_path: Path) -> None:
    narrow(target).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(HeadsmithError, match="16 wide and its target 32, but it has no embed_to"):
        Eagle3Head.load(tmp_path, num_target_layers=target.num_layers)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden_size": 33}, "33 is above the 32 of the target"),
        ({"num_heads": 4, "num_kv_heads": 3}, "4 heads cannot share 3 key/value heads"),
        ({"num_heads": 6}, "6 attention heads do not divide a width of 16"),
        ({"head_dim": 7}, "head_dim of 7 is odd"),
    ],
)
def test_sizes_that_make_no_head_are_refused(
    target: Target, sizes: dict[str, int], said: str
) -> None:
    with pytest.raises(HeadsmithError, match=said):
        narrow(target, **sizes)


@pytest.mark.parametrize("shape", ["chain:3", "tree:10,3,3"])
def test_its_text_is_the_targets(target: Target, shape: str) -> None:
    ids = torch.randint(0, 256, (19,), generator=torch.Generator().manual_seed(4)).tolist()
    requests = [Request("a", "task", ids[:7]), Request("b", "task", ids[7:])]

    def text(drafter: Any) -> list[list[int]]:
        decoder = Decoder(target, drafter, batch=2, max_new_tokens=20)
        return [r.output_ids for r in decoder.generate(requests)[0]]

    assert text(EagleDrafter(narrow(target), target, parse_shape(shape))) == text(None)
