"""A fresh head: all parts of its layer are equally loud, whatever the target's states look like."""

from dataclasses import replace

import pytest
import torch

from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.eagle3_config import Eagle3Config
from headsmith.models.eagle3_init import balance_taps, initialise
from headsmith.models.target import Target


def rms(x: torch.Tensor) -> torch.Tensor:
    return x.detach().square().mean(-1).sqrt()


def loud_taps(rows: int, width: int) -> torch.Tensor:
    """Three taps of sizes 1, 10 and 100, and a sink row that is a thousand times larger."""
    taps = torch.randn(rows, 3, width, generator=torch.Generator().manual_seed(0))
    taps *= torch.tensor([1.0, 10.0, 100.0])[:, None]
    taps[0] *= 1000
    return taps


@pytest.fixture
def head(target: Target) -> Eagle3Head:
    return Eagle3Head.for_target(target, torch.arange(0, 300, 2), seed=1)


def test_its_matrices_keep_the_size_of_what_they_read(head: Eagle3Head) -> None:
    attention, mlp = head.midlayer.self_attn, head.midlayer.mlp
    for linear in (head.fc, attention.k_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj):
        x = torch.randn(400, linear.in_features, generator=torch.Generator().manual_seed(2))
        assert rms(linear(x)).mean() == pytest.approx(1.0, abs=0.15)


def test_a_row_reads_mostly_itself(head: Eagle3Head) -> None:
    layer, d = head.midlayer, head.config.head_dim
    generator = torch.Generator().manual_seed(3)
    u = layer.inputs(*torch.randn(2, 20, head.config.hidden_size, generator=generator))
    cos, sin = head.cos_sin(torch.arange(20))
    queries, (keys, _) = layer.query(u, cos, sin), layer.key_value(u, cos, sin)
    keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)
    weights = (queries @ keys.transpose(1, 2) / d**0.5).softmax(-1)
    assert (weights.diagonal(dim1=1, dim2=2).mean(1) > 5 * weights.mean()).all()


FLAGS = [{}, {"fc_norm": True}, {"norm_before_fc": True}, {"fc_norm": True, "norm_before_fc": True}]


def with_flags(target: Target, flags: dict[str, bool]) -> Eagle3Head:
    """A fresh head, also with flags that no recipe trains."""
    ids = torch.arange(50)
    head = Eagle3Head(replace(Eagle3Config.for_target(target, len(ids)), **flags), ids)
    initialise(head, target.head_weight[ids], 0)
    return head


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "eagle3")
def test_balanced_taps_weigh_the_same(target: Target, flags: dict[str, bool]) -> None:
    head = with_flags(target, flags)
    taps = loud_taps(200, target.hidden_size)
    balance_taps(head, taps)
    z = head.fuse(taps)
    assert rms(z).median() == pytest.approx(1.0, rel=0.2)
    blocks = head.fc.weight.split(target.hidden_size, 1)
    parts = [rms(x @ w.T).median() for x, w in zip(head.read(taps).unbind(1), blocks, strict=True)]
    assert max(parts) / min(parts) < 1.3


def test_taps_with_a_norm_each_are_balanced_already(target: Target) -> None:
    head = with_flags(target, {"fc_norm": True})
    before = head.fc.weight.detach().clone()
    balance_taps(head, loud_taps(200, target.hidden_size))
    torch.testing.assert_close(head.fc.weight.detach(), before, rtol=1e-3, atol=0)


def test_without_balance_the_loudest_tap_drowns_the_others(head: Eagle3Head) -> None:
    taps = loud_taps(200, head.config.target_width)
    assert rms(head.fuse(taps)).median() > 20


def test_a_silent_tap_is_left_finite(head: Eagle3Head) -> None:
    balance_taps(head, torch.zeros(5, 3, head.config.target_width))
    assert torch.isfinite(head.fc.weight).all()
