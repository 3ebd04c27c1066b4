"""Drafters: what proposes the trees that the target verifies (spec/eagle.md 6)."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.beam import draft_trees
from headsmith.inference.cache import KeyValueCache
from headsmith.inference.head_reading import HeadReading
from headsmith.inference.kernels import takes
from headsmith.inference.noise import Place
from headsmith.inference.ranking import ranking_of_head
from headsmith.inference.records import Request
from headsmith.inference.stages import stage
from headsmith.inference.tree import Branches, Chain, Draft, DynamicTree, RankTree, Shape, Tree
from headsmith.models.attention import ragged_attention
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.linear import pack_linears
from headsmith.models.spans import Span, positions_of
from headsmith.models.target import Target


@dataclass(slots=True)
class Update:
    """What one request committed since the drafter last saw it: rows (x[i+1], taps of x[i]).

    `tokens` [n] are the committed tokens behind the tapped ones, `taps` [n, m, H] the target's own
    states: never the drafter's guesses, never those of rejected nodes. They are the `rows` of a
    pass's `states` [T, m, H], None all. The last token is the root of the next tree, `last` [H] the
    target's post-norm state of the token before it, and `place` where the token behind the root
    will stand.
    `request` comes with its first update, whose tokens are those of the prompt but the first.
    `likeliest`: for a drafter with `reads_likeliest`, the target's argmax behind every node of the
    tree that was verified, which the engine may have cut at the end of the context.
    """

    slot: int
    tokens: list[int]
    states: Tensor
    last: Tensor | None = None
    place: Place | None = None
    request: Request | None = None
    likeliest: list[int] | None = None
    rows: list[int] | None = None

    @property
    def taps(self) -> Tensor:
        return self.states if self.rows is None else self.states[self.rows]


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


def whole(update: Update) -> list[int]:
    """The tokens that a drafter has not seen yet: those of an update, and before the first of a
    request the prompt's first.
    """
    first = update.request.prompt_ids[:1] if update.request is not None else []
    return [*first, *update.tokens]


class EagleDrafter:
    """Drafts with an EAGLE-3 head: chains, or trees by beam search over the head's own
    probabilities or of fixed ranks.

    The head's cache holds one row for each committed token but the root. What drafting adds behind
    them is overwritten at the next update.
    """

    def __init__(self, head: Eagle3Head, target: Target, shape: Draft) -> None:
        if isinstance(shape, Branches):
            raise HeadsmithError(
                f"draft {shape} is a tree of draws, which only rule ratio at a temperature above 0 "
                "makes; give chain:DEPTH or tree:NODES,TOPK,DEPTH"
            )
        if not isinstance(shape, Chain | DynamicTree | RankTree):
            raise HeadsmithError(
                f"draft {shape} is a tree of a Medusa head, and this head is of kind {head.kind}; "
                "give chain:DEPTH or tree:NODES,TOPK,DEPTH"
            )
        if isinstance(shape, RankTree) and shape.ranks > head.config.draft_vocab_size:
            raise HeadsmithError(
                f"draft {shape} asks for {shape.ranks} tokens at a place and the head can draft "
                f"{head.config.draft_vocab_size}; give a narrower tree"
            )
        # A copy: packing weights for inference would end a head that is still trained.
        self.head = copy.deepcopy(head).to(target.device, target.dtype).requires_grad_(False).eval()
        # Kernels read the weights as they are.
        if not takes(target.head_weight):
            pack_linears(self.head)
        self.reading, self.ranking = HeadReading(self.head), ranking_of_head(self.head)
        self.target, self.taps = target, head.taps
        self.shape: Shape = shape
        self.cache = KeyValueCache(0, 0)
        self._lengths: list[int] = []

    @property
    def cache_bytes(self) -> int:
        """Keys and values of the head."""
        return self.cache.nbytes

    def reset(self, slots: int, capacity: int) -> None:
        # What was captured on a GPU keeps its memory.
        keep = takes(self.target.head_weight)
        self.cache = self.cache.fitting(slots, capacity) if keep else KeyValueCache(slots, capacity)
        self._lengths = [0] * slots

    def release(self, slot: int) -> None:
        self._lengths[slot] = 0

    def absorb(self, update: Update) -> None:
        """Take in what was committed without a draft behind it."""
        self._extend([update])

    def follow(self, slot: int, rows: int) -> None:
        """Rounds on the device (inference/resident/) have filled so many rows of a slot."""
        self._lengths[slot] = rows

    @torch.inference_mode()
    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        slots = [update.slot for update in updates]
        roots = [update.tokens[-1] for update in updates]
        with stage("draft input"):
            g = self._extend(updates)
        if isinstance(self.shape, Chain):
            return self._chains(slots, roots, g, self.shape.depth)
        assert isinstance(self.shape, DynamicTree | RankTree), "branches are drawn elsewhere"
        return self._trees(slots, roots, g, self.shape)

    def _extend(self, updates: Sequence[Update]) -> Tensor:
        """Cache the committed rows; returns g of each request's last row [B, H]. Only those rows
        need more than keys.
        """
        spans = [Span(len(u.tokens), self._lengths[u.slot], u.slot) for u in updates]
        for update, span in zip(updates, spans, strict=True):
            self._lengths[update.slot] = span.start + span.length
        tokens = torch.tensor([t for u in updates for t in u.tokens], device=self.target.device)
        z = self.reading.fuse([(u.states, u.rows) for u in updates])
        last = torch.tensor([s.length for s in spans], device=tokens.device).cumsum(0) - 1
        return self._layer(tokens, z, spans, last)

    def _layer(
        self, tokens: Tensor, z: Tensor, spans: Sequence[Span], last: Tensor | None = None
    ) -> Tensor:
        """`run_layer` over the spans of its cache."""

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return ragged_attention(
                query,
                keys,
                values,
                spans,
                cache=self.cache,
                last_only=last is not None,
                window=self.head.config.sliding_window,
            )

        return self.run_layer(tokens, z, positions_of(spans, tokens.device), attend, last)

    def run_layer(
        self,
        tokens: Tensor,
        z: Tensor,
        positions: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        last: Tensor | None = None,
    ) -> Tensor:
        """The head's layer over new rows: tokens [T], z [T, H], positions [T] -> g [T, H], or of
        the rows `last` only, which are then all that `attend` gets queries of.
        """
        layer = self.head.midlayer
        u = self.reading.inputs(self.head.embed(self.target, tokens), z)
        cos, sin = self.head.cos_sin(positions)
        keys, values = layer.key_value(u, cos, sin)
        if last is not None:
            u, z, cos, sin = u[last], z[last], cos[last], sin[last]
        return layer.output(z, attend(layer.query(u, cos, sin), keys, values))

    def _chains(self, slots: list[int], roots: list[int], g: Tensor, depth: int) -> list[Tree]:
        drafted: list[Tensor] = []
        for step in range(depth):
            with stage("draft lm_head"):
                tokens = self.ranking.likeliest(g)
            drafted.append(tokens)
            if step + 1 < depth:
                spans = [Span(1, self._lengths[slot] + step, slot) for slot in slots]
                with stage("draft layer"):
                    g = self._layer(tokens, self.head.feedback(g), spans)
        rows = torch.stack(drafted, 1).tolist()
        return [Tree.chain([root, *row]) for root, row in zip(roots, rows, strict=True)]

    def _trees(
        self, slots: list[int], roots: list[int], g: Tensor, shape: DynamicTree | RankTree
    ) -> list[Tree]:
        """A tree for each request, from the g [B, H] of its last row."""
        states = self.head.feedback(g)[:, None]

        def expand(tokens: Tensor, origins: Tensor, seen: Tensor, depths: Tensor) -> Tensor:
            nonlocal states
            batch, m = tokens.shape
            states = states.gather(1, origins[:, :, None].expand(-1, -1, states.shape[-1]))
            spans = [
                Span(m, self._lengths[slot], slot, seen[i], depths) for i, slot in enumerate(slots)
            ]
            with stage("draft layer"):
                g = self._layer(tokens.flatten(), states.flatten(0, 1), spans)
                states = self.head.feedback(g).view(batch, m, -1)
            return g.view(batch, m, -1)

        return draft_trees(g, expand, shape, roots, self.ranking)
