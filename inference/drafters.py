"""Drafters: what proposes the trees that the target verifies (spec/eagle.md 6)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.cache import KeyValueCache
from headsmith.inference.noise import Place
from headsmith.inference.tree import Branches, Chain, Draft, DynamicTree, Shape, Tree, choose_nodes
from headsmith.models.attention import ragged_attention
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.linear import pack_linears
from headsmith.models.spans import Span, positions_of
from headsmith.models.target import Target


@dataclass(slots=True)
class Update:
    """What one request committed since the drafter last saw it: rows (x[i+1], taps of x[i]).

    `tokens` [n] are the committed tokens behind the tapped ones, `taps` [n, m, H] the target's own
    states: never the drafter's guesses, never those of rejected nodes. The last token is the root
    of the next tree, `last` [H] the target's post-norm state of the token before it, and `place`
    where the token behind the root will stand.
    """

    slot: int
    tokens: list[int]
    taps: Tensor
    last: Tensor | None = None
    place: Place | None = None


class Drafter(Protocol):
    """Anything that proposes. `taps` names the states it reads; `shape` bounds what it proposes."""

    taps: tuple[int, ...]

    @property
    def shape(self) -> Shape: ...

    def reset(self, slots: int, capacity: int) -> None:
        """Forget everything and make room for `slots` requests of `capacity` tokens."""

    def release(self, slot: int) -> None:
        """Forget the request in `slot`."""

    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        """Take in what was committed and propose a tree for each request, in order."""


@dataclass(slots=True)
class _Frontier:
    """The deepest drafted tokens of B requests, k each: target ids [B, k] and the states that
    drafted them [B, k, H].
    """

    tokens: Tensor
    states: Tensor


class EagleDrafter:
    """Drafts with an EAGLE-3 head: chains, or trees by beam search over the head's own
    probabilities.

    The head's cache holds one row for each committed token but the root. What drafting adds behind
    them is overwritten at the next update.
    """

    def __init__(self, head: Eagle3Head, target: Target, shape: Draft) -> None:
        if isinstance(shape, Branches):
            raise HeadsmithError(
                f"draft {shape} is a tree of draws, which only rule ratio at a temperature above 0 "
                "makes; give chain:DEPTH or tree:NODES,TOPK,DEPTH"
            )
        if not isinstance(shape, Chain | DynamicTree):
            raise HeadsmithError(
                f"draft {shape} is a tree of a Medusa head, and this head is of kind {head.kind}; "
                "give chain:DEPTH or tree:NODES,TOPK,DEPTH"
            )
        # A copy: packing weights for inference would end a head that is still trained.
        self.head = copy.deepcopy(head).to(target.device, target.dtype).requires_grad_(False).eval()
        pack_linears(self.head)
        self.target, self.taps = target, head.taps
        self.shape: Shape = shape
        self._cache = KeyValueCache(0, 0)
        self._lengths: list[int] = []

    def reset(self, slots: int, capacity: int) -> None:
        self._cache = KeyValueCache(slots, capacity)
        self._lengths = [0] * slots

    def release(self, slot: int) -> None:
        self._lengths[slot] = 0

    @torch.inference_mode()
    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        slots = [update.slot for update in updates]
        roots = [update.tokens[-1] for update in updates]
        g = self._extend(updates)
        if isinstance(self.shape, Chain):
            return self._chains(slots, roots, g, self.shape.depth)
        assert isinstance(self.shape, DynamicTree)
        return self._trees(slots, roots, g, self.shape)

    def _extend(self, updates: Sequence[Update]) -> Tensor:
        """Cache the committed rows; returns g of each request's last row [B, H]. Only those rows
        need more than keys.
        """
        spans = [Span(len(u.tokens), self._lengths[u.slot], u.slot) for u in updates]
        for update, span in zip(updates, spans, strict=True):
            self._lengths[update.slot] = span.start + span.length
        tokens = torch.tensor([t for u in updates for t in u.tokens], device=self.target.device)
        z = self.head.fuse(torch.cat([u.taps for u in updates]))
        last = torch.tensor([s.length for s in spans], device=tokens.device).cumsum(0) - 1
        return self._layer(tokens, z, spans, last)

    def _layer(
        self, tokens: Tensor, z: Tensor, spans: Sequence[Span], last: Tensor | None = None
    ) -> Tensor:
        """The head's layer over new rows: tokens [T], z [T, H] -> g [T, H], or of the rows `last`
        only.
        """
        layer = self.head.midlayer
        u = layer.inputs(self.head.embed(self.target, tokens), z)
        cos, sin = self.head.cos_sin(positions_of(spans, tokens.device))
        keys, values = layer.key_value(u, cos, sin)
        if last is not None:
            u, z, cos, sin = u[last], z[last], cos[last], sin[last]
        attended = ragged_attention(
            layer.query(u, cos, sin),
            keys,
            values,
            spans,
            cache=self._cache,
            last_only=last is not None,
            window=self.head.config.sliding_window,
        )
        return layer.output(z, attended)

    def _chains(self, slots: list[int], roots: list[int], g: Tensor, depth: int) -> list[Tree]:
        drafted: list[Tensor] = []
        for step in range(depth):
            tokens = self.head.draft_ids[self.head.logits(g).argmax(-1)]
            drafted.append(tokens)
            if step + 1 < depth:
                spans = [Span(1, self._lengths[slot] + step, slot) for slot in slots]
                g = self._layer(tokens, self.head.feedback(g), spans)
        rows = torch.stack(drafted, 1).tolist()
        return [Tree.chain([root, *row]) for root, row in zip(roots, rows, strict=True)]

    def _trees(
        self, slots: list[int], roots: list[int], g: Tensor, shape: DynamicTree
    ) -> list[Tree]:
        """Beam search: expand the k likeliest of each level, then keep the likeliest nodes of all
        levels.
        """
        batch, k = len(slots), min(shape.topk, self.head.config.draft_vocab_size)
        own = torch.eye(k, dtype=torch.bool, device=g.device).expand(batch, k, k)
        scores, ids = self.head.logits(g).float().log_softmax(-1).topk(k)
        tokens = self.head.draft_ids[ids]
        levels = [(tokens, scores, torch.full_like(ids, -1))]
        frontier = _Frontier(tokens, self.head.feedback(g)[:, None].expand(batch, k, -1))
        numbers = torch.arange(k, device=g.device).expand(batch, k)
        seen, first = own, k
        for level in range(shape.depth - 1):
            g = self._expand(slots, frontier, seen, level)
            logp, ids = self.head.logits(g).float().log_softmax(-1).topk(k)
            logp = scores[:, :, None] + logp.view(batch, k, k)
            tokens = self.head.draft_ids[ids].view(batch, k * k)
            levels.append((tokens, logp.flatten(1), numbers.repeat_interleave(k, 1)))
            scores, picked = logp.flatten(1).topk(k)
            parents = picked // k
            states = self.head.feedback(g).view(batch, k, -1)
            frontier = _Frontier(
                tokens.gather(1, picked),
                states.gather(1, parents[:, :, None].expand(-1, -1, states.shape[-1])),
            )
            seen = torch.cat(
                [seen.gather(1, parents[:, :, None].expand(-1, -1, seen.shape[-1])), own], -1
            )
            numbers, first = first + picked, first + k * k
        tokens, scores, parents = (torch.cat(column, 1) for column in zip(*levels, strict=True))
        return [
            choose_nodes(tokens[i], scores[i], parents[i], root, shape.nodes)
            for i, root in enumerate(roots)
        ]

    def _expand(self, slots: list[int], frontier: _Frontier, seen: Tensor, level: int) -> Tensor:
        """Run the k frontier nodes of each request behind their ancestors; returns g [B * k, H]."""
        k = frontier.tokens.shape[1]
        depths = torch.arange(level + 1).repeat_interleave(k)
        spans = [
            Span(k, self._lengths[slot], slot, seen[i], depths) for i, slot in enumerate(slots)
        ]
        return self._layer(frontier.tokens.flatten(), frontier.states.flatten(0, 1), spans)
