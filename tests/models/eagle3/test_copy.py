"""A fitted head copies what followed the newest token before, at any distance, and only where it
can.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headsmith.models import eagle3_copy
from headsmith.models.attention import ragged_attention
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.eagle3_fit import LinearFit
from headsmith.models.eagle3_init import balance_taps
from headsmith.models.spans import Span
from headsmith.models.target import Target

TOKENS = 270


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linear guess of a random model is noise; copies must be heard above it."""
    monkeypatch.setattr(eagle3_copy, "LOGIT", 30.0)


@pytest.fixture
def wide(write_target: Callable[..., Path], make_model: Callable[..., Any]) -> Target:
    """A target with room for a code: H 128, two groups of heads of 64."""
    sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 96, "num_hidden_layers": 8}
    return Target.load(write_target(make_model("llama", **sizes)))


def fit(target: Target, rows: int = 2000, **head_arguments: Any) -> Eagle3Head:
    """A head fitted on `rows` rows of random text."""
    ids = torch.randint(TOKENS, (rows // 50, 50), generator=torch.Generator().manual_seed(1))
    # A random model forgets its input at once; tap 0 stands for the early tap of a real one.
    taps = (0, 3, 5)
    head = Eagle3Head.for_target(target, torch.arange(TOKENS), taps=taps, **head_arguments)
    states = [target.features(row, [50], taps) for row in ids]
    fitting = LinearFit(head, target, balance_taps(head, torch.cat([s.taps for s in states])))
    for row, seen in zip(ids, states, strict=True):
        fitting.add(seen.taps[:-1], row[:-1], row[1:], seen.last[1:])
    fitting.apply()
    return head


@torch.no_grad()
def says(head: Eagle3Head, target: Target, ids: Tensor) -> Tensor:
    """First choice of every row but the last, behind which there is no token."""
    taps = target.features(ids, [len(ids)], head.taps).taps[:-1]
    layer, z = head.midlayer, head.fuse(taps)
    u = layer.inputs(head.embed(target, ids[1:]), z)
    cos_sin = head.cos_sin(torch.arange(len(u)))
    keys, values = layer.key_value(u, *cos_sin)
    attended = ragged_attention(layer.query(u, *cos_sin), keys, values, [Span(len(u))])
    return head.draft_ids[head.logits(layer.output(z, attended)).argmax(-1)]


def copied(head: Eagle3Head, target: Target, distance: int) -> float:
    """Share of rows that say what followed their newest token, all tokens said once and again."""
    once = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))[:distance]
    said = says(head, target, torch.cat([once, once]))
    # Row `distance - 1` reads the first token that was there before.
    return float((said[distance - 1 : -1] == once[1:]).float().mean())


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}])
@pytest.mark.parametrize("distance", [30, 100])
def test_it_copies(
    wide: Target, flags: dict[str, bool], distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = fit(wide, **flags)
    assert copied(head, wide, distance) > 0.7
    monkeypatch.setattr(eagle3_copy, "LEGIBLE", 2.0)
    assert copied(fit(wide, **flags), wide, distance) < 0.2


def test_the_same_rows_give_the_same_head(wide: Target) -> None:
    for a, b in zip(fit(wide).parameters(), fit(wide).parameters(), strict=True):
        assert torch.equal(a, b)


def test_heads_that_cannot_copy_are_fitted_all_the_same(wide: Target) -> None:
    """One key/value group, few rows: everything goes to the linear guess."""
    for head in (fit(wide, num_kv_heads=1), fit(wide, rows=200)):
        assert all(torch.isfinite(p).all() for p in head.parameters())
        assert copied(head, wide, 20) < 0.2


def test_taps_that_do_not_tell_their_token_are_not_asked(
    wide: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    real = eagle3_copy.Copying.of
    monkeypatch.setattr(
        "headsmith.models.eagle3_fit.Copying.of",
        lambda *arguments: found.append(real(*arguments)) or found[-1],
    )
    fit(wide)
    monkeypatch.setattr(Target, "features", _noise)
    fit(wide)
    assert found[0] is not None and found[1] is None


def _noise(target: Target, ids: Tensor, lengths: list[int], taps: tuple[int, ...]) -> Any:
    from headsmith.models.prefix import Features

    torch.manual_seed(int(ids[0]))
    states = torch.randn(len(ids), len(taps) + 1, target.hidden_size)
    return Features(states[:, 1:], states[:, 0])
