"""A fitted head says what a linear target would say, before any training."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.eagle3_config import Eagle3Config
from headsmith.models.eagle3_fit import LOUD, LinearFit, Moments
from headsmith.models.eagle3_init import balance_taps, initialise
from headsmith.models.target import Target

IDS = torch.arange(0, 300, 2)
FLAGS: list[dict[str, bool]] = [{}, {"fc_norm": True}, {"norm_output": True}]


def make_head(target: Target, **flags: bool) -> Eagle3Head:
    head = Eagle3Head(replace(Eagle3Config.for_target(target, len(IDS)), **flags), IDS)
    initialise(head, target.head_weight[IDS], 0)
    return head.double()


def linear_rows(head: Eagle3Head, target: Target, n: int, seed: int) -> SimpleNamespace:
    """Rows of a made-up target: its last state is linear in what `head` reads, the part of the
    embedding of the rank that the values have room for. Taps differ a hundredfold in size.
    """
    config, fixed = head.config, torch.Generator().manual_seed(7)
    draw = torch.Generator().manual_seed(seed)
    taps = torch.randn(n, 3, config.target_width, generator=draw, dtype=torch.float64)
    taps = taps * torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)[:, None]
    own, ids = torch.randint(target.vocab_size, (2, n), generator=draw)
    rank = config.num_kv_heads * config.head_dim
    of_taps = torch.randn(head.fc.in_features, config.hidden_size, generator=fixed).double()
    first = torch.randn(config.hidden_size, rank, generator=fixed).double()
    second = torch.randn(rank, config.hidden_size, generator=fixed).double()
    scale = torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(config.target_width).double()
    read = head.read(taps).flatten(1)
    if not config.fc_norm:
        read = read / scale
    embeds = head.midlayer.input_layernorm(head.embed(target, ids).double())
    channels = torch.linspace(0.2, 5, config.hidden_size).double()
    state = read @ of_taps / 10 + embeds @ first @ second / 20
    return SimpleNamespace(taps=taps, own=own, ids=ids, last=(state * channels).detach())


def says(head: Eagle3Head, target: Target, taps: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The normalised state [n, H] of rows that attend to nothing but themselves."""
    layer, z = head.midlayer, head.fuse(taps)
    u = layer.inputs(head.embed(target, ids).to(z), z)
    values = layer.key_value(u, *head.cos_sin(torch.zeros(len(ids))))[1]
    shares = head.config.num_heads // head.config.num_kv_heads
    return head.norm(layer.output(z, values.repeat_interleave(shares, 0)))


def fitted(head: Eagle3Head, target: Target, rows: SimpleNamespace) -> LinearFit:
    fit = LinearFit(head, target, balance_taps(head, rows.taps))
    fit.add(rows.taps, rows.own, rows.ids, rows.last)
    return fit


def likeness(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b).mean().detach())


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "eagle3")
def test_it_finds_a_linear_target(target: Target, flags: dict[str, bool]) -> None:
    head = make_head(target, **flags)
    rows, unseen = (linear_rows(head, target, n, seed) for n, seed in ((3000, 1), (200, 2)))
    before = likeness(says(head, target, unseen.taps, unseen.ids), unseen.last)
    fitted(head, target, rows).apply()
    state = says(head, target, unseen.taps, unseen.ids)
    assert abs(before) < 0.3 and likeness(state, unseen.last) > 0.97
    # The final norm gives every channel its size back.
    sizes = [x.detach().square().mean(0).sqrt() for x in (state, unseen.last)]
    torch.testing.assert_close(*sizes, rtol=0.35, atol=0)


def test_nothing_of_a_fitted_head_is_cut_off_from_its_gradient(target: Target) -> None:
    head = make_head(target)
    rows = linear_rows(head, target, 400, 1)
    fitted(head, target, rows).apply()
    optimiser = torch.optim.SGD(head.parameters(), lr=1e-3)
    for _ in range(2):  # the silent MLP passes nothing on in the first step
        head.zero_grad()
        head.lm_head(says(head, target, rows.taps, rows.ids)).square().sum().backward()
        optimiser.step()
    still = [n for n, p in head.named_parameters() if p.grad is None or not p.grad.any()]
    # A row that sees only itself has no use for queries and keys.
    assert all("q_proj" in name or "k_proj" in name for name in still)


def test_parts_add_up_and_loud_rows_stay_out(target: Target) -> None:
    head = make_head(target)
    rows = linear_rows(head, target, 100, 1)
    sizes = balance_taps(head, rows.taps)
    whole, parts = (LinearFit(head, target, sizes) for _ in range(2))
    whole.add(rows.taps, rows.own, rows.ids, rows.last)
    for part in (slice(30), slice(30, None)):
        parts.add(rows.taps[part], rows.own[part], rows.ids[part], rows.last[part])
    parts.add(rows.taps[:5] * 3 * LOUD, rows.own[:5], rows.ids[:5], rows.last[:5])
    for a, b in zip(whole.moments.tensors, parts.moments.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("rows", [0, 3])
def test_hardly_any_rows_leave_a_head_of_numbers(target: Target, rows: int) -> None:
    head = make_head(target)
    some = linear_rows(head, target, 50, 1)
    fit = LinearFit(head, target, balance_taps(head, some.taps))
    fit.add(some.taps[:rows], some.own[:rows], some.ids[:rows], some.last[:rows])
    fit.apply()
    assert all(torch.isfinite(p).all() for p in head.parameters())


def test_a_narrow_head_is_fitted_to_the_states_its_own_lm_head_needs(target: Target) -> None:
    head = Eagle3Head.for_target(target, IDS, hidden_size=target.hidden_size // 2).double()
    fit = LinearFit(head, target, torch.ones(3))
    assert fit.narrowing is not None
    last = torch.randn(40, target.hidden_size, dtype=torch.float64)
    wanted = last @ target.head_weight[IDS].double().T
    got = head.lm_head(last @ fit.narrowing.T).detach()
    assert likeness(got, wanted) > 0.6
    assert Moments.zeros(head, target.device).cross.shape == (
        3 * target.hidden_size + target.hidden_size // 2,
        target.hidden_size // 2,
    )


def test_the_same_rows_give_the_same_head(target: Target) -> None:
    heads = [make_head(target), make_head(target)]
    for head in heads:
        fitted(head, target, linear_rows(head, target, 200, 1)).apply()
    for a, b in zip(*(h.parameters() for h in heads), strict=True):
        assert torch.equal(a, b)
