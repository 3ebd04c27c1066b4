"""Prompt lookup (spec/medusa.md 5.2): what followed the last tokens when they stood before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headsmith.inference.drafter_choice import Ngram, check_draft
from headsmith.inference.drafters import Update, whole
from headsmith.inference.runs import tree_of_runs
from headsmith.inference.tree import Chain, Draft, DynamicTree, Tree


class NgramDrafter:
    """Drafts from the request's own prompt and answer; nothing where there is no match.

    A run that reaches the end of the text goes on with itself, as periodic text does, so it is
    always as long as the shape is deep. Trees hold the runs behind several matches.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, choice: Ngram, shape: Draft) -> None:
        check_draft(choice, shape)
        assert isinstance(shape, Chain | DynamicTree)
        self.choice = choice
        self.shape: Chain | DynamicTree = shape
        self._texts: dict[int, _Text] = {}

    def reset(self, slots: int, capacity: int) -> None:
        self._texts = {}

    def release(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        return [self._draft(update) for update in updates]

    def _draft(self, update: Update) -> Tree:
        if update.request is not None:
            self._texts[update.slot] = _Text(self.choice)
        text = self._texts[update.slot]
        text.extend(whole(update))
        depth = self.shape.depth
        runs = (following(text.tokens, place, depth) for place in text.places())
        return tree_of_runs(update.tokens[-1], runs, self.shape)


class _Text:
    """The tokens of a request, and where each n-gram of them ends."""

    def __init__(self, choice: Ngram) -> None:
        self.choice = choice
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in range(self.choice.minimum, min(self.choice.maximum, end) + 1):
                self._ends.setdefault(tuple(self.tokens[end - n :]), []).append(end)

    def places(self) -> Iterator[int]:
        """Where the text goes on behind what is like its end, the best match first."""
        choice, end = self.choice, len(self.tokens)
        longest = choice.minimum if choice.pick == "recent" else choice.maximum
        seen = {end}
        for n in range(min(longest, end), choice.minimum - 1, -1):
            places = self._ends.get(tuple(self.tokens[end - n :]), [])
            for place in places if choice.pick == "first" else reversed(places):
                if place not in seen:
                    seen.add(place)
                    yield place


def following(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on, which is before the end; a text that ends goes on with what
    was read so far.
    """
    run: list[int] = []
    for at in range(place, place + count):
        run.append(tokens[at] if at < len(tokens) else run[at - len(tokens)])
    return run
