"""What benchmarks/gpu_kernels.py runs: every kernel beside its reference, on random tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headsmith.inference.kernels import compaction, head_input, lm_head, tree_attention
from headsmith.inference.kernels import tree_build as building
from headsmith.inference.kernels import verify as verifying
from headsmith.inference.kernels.compaction import Stores
from headsmith.inference.kernels.plan import Plan
from headsmith.inference.kernels.tree_build import Candidates
from headsmith.inference.kernels.verify import Choose, Limits, Nodes
from headsmith.models.spans import Span
from headsmith.train.kernels import distil_rows, unroll_attention
from headsmith.train.kernels.distil_rows import Parts, Rows
from headsmith.train.kernels.unroll_attention import Layout
from headsmith.train.loss import LossSettings

Tensors = Sequence[Tensor]
# What is run: (kernel or reference, dtype) -> its results.
Run = Callable[[bool, torch.dtype], Tensors]


@dataclass(frozen=True)
class Sizes:
    """Width of the target, head size, query heads, prefix, vocabularies, rows and layers."""

    width: int
    d: int
    heads: int
    groups: int
    prefix: int
    vocab: int
    drafted: int
    nodes: int
    layers: int
    tokens: int


REAL = Sizes(4096, 128, 32, 8, 3000, 128256, 32000, 61, 32, 1024)
DRY = Sizes(48, 16, 4, 2, 37, 90, 40, 9, 2, 24)


class Made:
    """Random tensors on the device, the same for the same seed and in every dtype."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def normal(self, seed: int, *shape: int, scale: float = 1.0) -> Tensor:
        """In bfloat16, so that every dtype holds the same numbers."""
        generator = torch.Generator(self.device).manual_seed(seed)
        made = torch.randn(shape, generator=generator, device=self.device) * scale
        return made.bfloat16()

    def ids(self, seed: int, most: int, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(most, shape, generator=generator, device=self.device)


def tree_of(nodes: int) -> tuple[list[int], Tensor, Tensor]:
    """Parents, ancestors and depths of a tree whose nodes hang three to a parent."""
    parents = [-1] + [(node - 1) // 3 for node in range(1, nodes)]
    seen, depths = torch.eye(nodes, dtype=torch.bool), torch.zeros(nodes, dtype=torch.int64)
    for node in range(1, nodes):
        seen[node] |= seen[parents[node]]
        depths[node] = depths[parents[node]] + 1
    return parents, seen, depths


def attention(made: Made, at: Sizes) -> Iterator[tuple[str, Run]]:
    _, seen, depths = tree_of(at.nodes)
    spans = [
        Span(at.nodes, at.prefix, 0, seen, depths),
        Span(3, at.prefix // 2, 1),
        Span(1, 0, 2),
    ]
    plan = Plan.of(spans, made.device)
    total = sum(span.length for span in spans)
    stores = [made.normal(s, 3, at.groups, at.prefix + at.nodes, at.d) for s in (1, 2)]
    query = made.normal(3, at.heads, total, at.d)
    for name, window, cap in (("", None, None), (", window and cap", at.prefix // 3, 20.0)):

        def go(
            kernel: bool,
            dtype: torch.dtype,
            window: int | None = window,
            cap: float | None = cap,
        ) -> Tensors:
            function = tree_attention.tree_attention if kernel else tree_attention.reference
            tensors = [t.to(dtype) for t in (query, *stores)]
            return [function(*tensors, plan, window=window, softcap=cap)]

        yield f"tree attention{name}", go


def moving(made: Made, at: Sizes) -> Iterator[tuple[str, Run]]:
    paths = [[0, 2, 5, 8, 0], [0, 1, 3, 4, 7]]
    table = torch.tensor([[1, 7, 4, *paths[0]], [0, 5, 5, *paths[1]]], device=made.device).int()
    slots, starts, counts = (column.contiguous() for column in table[:, :3].unbind(1))

    def go(kernel: bool, dtype: torch.dtype) -> Tensors:
        kept = [made.normal(s, 2, at.groups, 40, at.d).to(dtype) for s in range(2 * at.layers)]
        (stores,) = Stores.of(kept)
        function = compaction.compact if kernel else compaction.reference
        function(stores, slots, starts, table[:, 3:].contiguous(), counts)
        return kept

    yield "compaction", go


def reading(made: Made, at: Sizes) -> Iterator[tuple[str, Run]]:
    taps = made.normal(1, 64, 3, at.width)
    weight = made.normal(2, at.width, 3 * at.width, scale=at.width**-0.5)
    norms, whole = made.normal(3, 3, at.width), made.normal(4, 3 * at.width)
    rows = made.ids(5, 64, 6)
    for name, each, all_taps in (("fc", 0, 0), ("norms and fc", 1, 0), ("one norm and fc", 0, 1)):

        def go(
            kernel: bool, dtype: torch.dtype, each: int = each, all_taps: int = all_taps
        ) -> Tensors:
            function = head_input.fuse_rows if kernel else head_input.reference_fuse
            given = [norms.to(dtype) if each else None, whole.to(dtype) if all_taps else None]
            return [function(taps.to(dtype), rows, weight.to(dtype), *given)]

        yield f"head input, {name}", go

    def side_by_side(kernel: bool, dtype: torch.dtype) -> Tensors:
        function = head_input.attention_input if kernel else head_input.reference_input
        embeds, z = taps[:10, 0].to(dtype), taps[:10, 1].to(dtype)
        return [function(embeds, z, norms[0].to(dtype), norms[1].to(dtype))]

    yield "head input, norms side by side", side_by_side


def ranking(made: Made, at: Sizes) -> Iterator[tuple[str, Run]]:
    for name, rows, vocab, k in (("draft", 10, at.drafted, 8), ("target", at.nodes, at.vocab, 1)):
        x = made.normal(1, rows, at.width)
        weight = made.normal(2, vocab, at.width, scale=at.width**-0.5)

        def go(
            kernel: bool, dtype: torch.dtype, x: Tensor = x, weight: Tensor = weight, k: int = k
        ) -> Tensors:
            function = lm_head.best_tokens if kernel else lm_head.reference
            found = function(x.to(dtype), weight.to(dtype), k)
            # Near ties may change places, so ids are compared by their logits.
            return [found.logits, found.lse]

        yield f"lm_head, {name}", go


def trees(made: Made, at: Sizes) -> Iterator[tuple[str, Run]]:
    batch, k, depth = 4, 4, 4
    scores = [made.normal(s, batch, 1 if s == 0 else k, k).float() for s in range(depth)]
    ids = [made.ids(9 + s, at.vocab, *one.shape) for s, one in enumerate(scores)]

    def go(kernel: bool, dtype: torch.dtype) -> Tensors:
        found = Candidates.empty(batch, k, depth, made.device)
        frontier = None
        for level in range(depth):
            logp = scores[level].log_softmax(-1).sort(-1, descending=True).values
            grow = building.grow if kernel else building.reference_grow
            frontier = grow(ids[level], logp, frontier, found, level)
        build = building.build if kernel else building.reference_build
        roots = made.ids(3, at.vocab, batch)
        assert frontier is not None
        return [*frontier, *build(found, roots, roots + 5, 24)]

    yield "tree build", go


def verification(made: Made, at: Sizes) -> Iterator[tuple[str, Run]]:
    parents, _, depths = tree_of(at.nodes)
    batch, device = 3, made.device
    logits = made.normal(1, batch * at.nodes, at.vocab, scale=2.0)
    tokens = made.ids(2, at.vocab, batch, at.nodes)
    for row in range(batch):
        # The first child of a few nodes is what the target says.
        for node in range(0, at.nodes // 3, row + 1):
            tokens[row, 3 * node + 1] = logits[row * at.nodes + node].float().argmax()
    offsets = torch.arange(batch + 1, device=device).int() * at.nodes
    levels = (depths.repeat(batch) + torch.arange(batch).repeat_interleave(at.nodes) * 9).to(device)
    nodes = Nodes(
        tokens.flatten(),
        torch.tensor(parents * batch, device=device).int(),
        offsets,
        levels,
        at.nodes,
    )
    noise = made.normal(7, 9 * batch, at.vocab).float()
    counts = torch.tensor([[4, 30], [2, 9], [60, 90]], device=device).T.contiguous()
    limits = Limits(tokens[0, :1].clone(), 64, 4096)
    for choose in (Choose("greedy"), Choose("sample", 0.7), Choose("typical", 0.6, 0.2)):

        def go(kernel: bool, dtype: torch.dtype, choose: Choose = choose) -> Tensors:
            function = verifying.verify if kernel else verifying.reference
            drawn = noise if choose.rule == "sample" else None
            return list(function(logits.to(dtype), nodes, choose, drawn, *counts, limits))

        yield f"verify, {choose.rule}", go


def loss(made: Made, at: Sizes) -> Iterator[tuple[str, Run]]:
    rows = 32
    logits, teacher = made.normal(1, rows, at.drafted), made.normal(2, rows, at.drafted)
    full = teacher.double().logsumexp(-1) + 0.1
    for name in ("kl", "lk"):

        def go(kernel: bool, dtype: torch.dtype, name: str = name) -> Tensors:
            wide = torch.promote_types(dtype, torch.float32)
            covered = torch.ones(rows, device=made.device, dtype=wide)
            known = Rows.begin(full.to(wide), covered, covered.clone())
            function = distil_rows.visit if kernel else distil_rows.reference
            slots, out = torch.arange(rows, device=made.device), logits
            settings = LossSettings(name=name)
            for parts in (Parts(statistics=True), Parts(sums=True), Parts(gradient=True)):
                given = logits.to(dtype, copy=True), teacher.to(dtype, copy=True)
                out = function(*given, slots, known, 0, settings, parts)
            # The kernel leaves the gradient where the logits were, in their dtype.
            return [known.lse, known.kl, known.losses(settings), (out * at.drafted).to(dtype)]

        yield f"distillation loss, {name}", go


def unrolling(made: Made, at: Sizes) -> Iterator[tuple[str, Run]]:
    rows = torch.arange(0, at.tokens, 2, device=made.device)
    lengths = [at.tokens // 3, at.tokens - at.tokens // 3]
    shapes = [(at.heads, len(rows)), (at.groups, at.tokens), (at.groups, at.tokens)]
    inputs = [made.normal(s, *shape, at.d) for s, shape in enumerate(shapes)]
    inputs += [made.normal(s, 2, at.groups, len(rows), at.d) for s in (7, 8)]
    grad = made.normal(9, at.heads, len(rows), at.d)

    def go(kernel: bool, dtype: torch.dtype) -> Tensors:
        given, layout = [x.to(dtype) for x in inputs], Layout(rows, lengths)
        if kernel:
            out, lse = unroll_attention.forward(*given, layout)
            back = unroll_attention.backward(*given, out, lse, grad.to(dtype), layout)
        else:
            out, lse = unroll_attention.reference_forward(*given, layout)
            delta = (grad.to(lse.dtype) * out).sum(-1)
            back = unroll_attention.reference_backward(*given, lse, delta, grad.to(dtype), layout)
        return [out, lse, *back]

    yield "unroll attention", go


PARTS = (attention, moving, reading, ranking, trees, verification, loss, unrolling)
