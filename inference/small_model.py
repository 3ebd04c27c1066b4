"""An independent small model as drafter: another causal language model with the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.beam import draft_trees
from headsmith.inference.cache import KeyValueCache
from headsmith.inference.drafter_choice import SmallModel, check_draft
from headsmith.inference.drafters import Update, whole
from headsmith.inference.ranking import ranking_of_target
from headsmith.inference.tree import Chain, Draft, DynamicTree, RankTree, Tree
from headsmith.models.spans import Span
from headsmith.models.target import Target


class ModelDrafter:
    """Drafts the small model's likeliest tokens: chains, or trees by beam search or of fixed ranks.

    Its own cache holds every committed token. What drafting adds behind them is overwritten by the
    next update: an accepted draft is run again, in the pass that runs the bonus token anyway.
    A request whose text would go beyond the small model's context gets no drafts any more.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, model: Target, target: Target, shape: Draft) -> None:
        check_draft(SmallModel(model.path), shape)
        check_same_tokens(model, target)
        assert isinstance(shape, Chain | DynamicTree | RankTree)
        self.model, self.shape = model, shape
        # Rows that pad one of the two vocabularies are no token of the other.
        self._ranking = ranking_of_target(model, min(model.vocab_size, target.vocab_size))
        if isinstance(shape, RankTree) and shape.ranks > self._ranking.size:
            raise HeadsmithError(
                f"draft {shape} asks for {shape.ranks} tokens at a place and the small model "
                f"{model.path} knows {self._ranking.size}"
            )
        self._cache = KeyValueCache(0, 0)
        self._lengths: list[int] = []
        self._full: set[int] = set()

    @property
    def cache_bytes(self) -> int:
        """Keys and values of the small model."""
        return self._cache.nbytes

    def reset(self, slots: int, capacity: int) -> None:
        self._cache = KeyValueCache(slots, capacity)
        self._lengths = [0] * slots
        self._full = set()

    def release(self, slot: int) -> None:
        self._lengths[slot] = 0
        self._full.discard(slot)

    @torch.inference_mode()
    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        drafted = [update for update in updates if self._has_room(update)]
        trees = dict(zip([u.slot for u in drafted], self._draft(drafted), strict=True))
        return [trees.get(u.slot, Tree([u.tokens[-1]], [-1])) for u in updates]

    def _has_room(self, update: Update) -> bool:
        """Whether text and drafts lie within the small model's context; once not, never again."""
        end = self._lengths[update.slot] + len(whole(update)) + self.shape.depth
        if end > self.model.max_context:
            self._full.add(update.slot)
        return update.slot not in self._full

    def _draft(self, updates: Sequence[Update]) -> list[Tree]:
        if not updates:
            return []
        slots = [update.slot for update in updates]
        roots = [update.tokens[-1] for update in updates]
        first = self._extend(updates)
        if isinstance(self.shape, Chain):
            return self._chains(slots, roots, first, self.shape.depth)

        def expand(tokens: Tensor, origins: Tensor, seen: Tensor, depths: Tensor) -> Tensor:
            batch, m = tokens.shape
            spans = [
                Span(m, self._lengths[slot], slot, seen[i], depths) for i, slot in enumerate(slots)
            ]
            return self._run(tokens.flatten(), spans).view(batch, m, -1)

        return draft_trees(first, expand, self.shape, roots, self._ranking)

    def _extend(self, updates: Sequence[Update]) -> Tensor:
        """Run what was committed; last states [B, H] of each root."""
        new = [whole(update) for update in updates]
        spans = [
            Span(len(tokens), self._lengths[u.slot], u.slot)
            for tokens, u in zip(new, updates, strict=True)
        ]
        for span in spans:
            self._lengths[span.slot] = span.start + span.length
        ids = torch.tensor([t for tokens in new for t in tokens], device=self.model.device)
        last = torch.tensor([len(tokens) for tokens in new], device=ids.device).cumsum(0) - 1
        return self._run(ids, spans)[last]

    def _chains(self, slots: list[int], roots: list[int], first: Tensor, depth: int) -> list[Tree]:
        drafted = [self._ranking.likeliest(first)]
        for step in range(depth - 1):
            spans = [Span(1, self._lengths[slot] + step, slot) for slot in slots]
            drafted.append(self._ranking.likeliest(self._run(drafted[-1], spans)))
        rows = torch.stack(drafted, 1).tolist()
        return [Tree.chain([root, *row]) for root, row in zip(roots, rows, strict=True)]

    def _run(self, ids: Tensor, spans: Sequence[Span]) -> Tensor:
        """Last states [n, H] of ids [n]."""
        known = ids.clamp(max=self.model.vocab_size - 1)
        return self.model.run(known, spans, self._cache).last


def check_same_tokens(model: Target, target: Target) -> None:
    """HeadsmithError unless every id is the same token for both. How a text is split does not
    matter: the target's tokenizer splits it for both.
    """
    own, other = ({i: t for t, i in x.tokenizer.get_vocab().items()} for x in (model, target))
    differing = sorted(i for i in own.keys() | other.keys() if own.get(i) != other.get(i))
    if differing:
        at = differing[0]
        raise HeadsmithError(
            f"the small model {model.path} has other tokens than the target {target.path}: "
            f"{len(differing)} ids differ, the first {at}, {own.get(at)!r} there and "
            f"{other.get(at)!r} here; draft with a model of the target's own family"
        )
