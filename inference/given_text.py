"""Given text: a draft of the whole answer, such as the file before an edit, followed for as long as
the answer agrees with it and found again after each difference.
"""

from __future__ import annotations

from collections.abc import Sequence

from headsmith.errors import HeadsmithError
from headsmith.inference.drafter_choice import GivenText, check_draft
from headsmith.inference.drafters import Update
from headsmith.inference.runs import tree_of_runs
from headsmith.inference.tree import Chain, Draft, DynamicTree, Tree

# Matches are told apart by up to this many tokens.
LONGEST = 16
# One token alone says little: it counts as a match only this close to where one is expected.
NEAR = 16


class GivenTextDrafter:
    """Drafts the given text behind the place that the answer has come to. `ids` are the tokens of a
    text for requests that bring none of their own (`Request.given_ids`).

    Trees hold the runs behind several places. Where the text has ended nothing is drafted.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, choice: GivenText, shape: Draft, ids: Sequence[int] | None = None) -> None:
        check_draft(choice, shape)
        assert isinstance(shape, Chain | DynamicTree)
        self.shape: Chain | DynamicTree = shape
        self._ids = ids
        self._followed: dict[int, Alignment] = {}

    def reset(self, slots: int, capacity: int) -> None:
        self._followed = {}

    def release(self, slot: int) -> None:
        self._followed.pop(slot, None)

    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        return [self._draft(update) for update in updates]

    def _draft(self, update: Update) -> Tree:
        new = update.tokens
        if update.request is not None:
            own = update.request.given_ids
            given = self._ids if own is None else own
            if given is None:
                raise HeadsmithError(
                    f"prompt {update.request.id} has no given text; add `given` to its row, or "
                    "name a file (text:FILE)"
                )
            self._followed[update.slot] = Alignment(given)
            new = update.tokens[len(update.request.prompt_ids) - 1 :]
        text = self._followed[update.slot]
        text.follow(new)
        runs = (text.given[at : at + self.shape.depth] for at in text.places())
        return tree_of_runs(update.tokens[-1], runs, self.shape)


class Alignment:
    """Where in the given text an answer has come to: `at` is the given token expected next."""

    def __init__(self, given: Sequence[int]) -> None:
        self.given = list(given)
        self.at = 0
        self._output: list[int] = []
        self._behind: dict[int, list[int]] = {}
        for place, token in enumerate(self.given, start=1):
            self._behind.setdefault(token, []).append(place)

    def follow(self, new: Sequence[int]) -> None:
        """Take in what was committed, and find the place again if it is not what was given."""
        same = list(new) == self.given[self.at : self.at + len(new)]
        self._output += new
        # Without a match, one token is taken to stand for another.
        self.at += len(new)
        if not same:
            self.at = next(iter(self._matches()), self.at)

    def places(self) -> list[int]:
        """Where the answer may go on, the likeliest first."""
        return list(dict.fromkeys([self.at, *self._matches()]))

    def _matches(self) -> list[int]:
        """Places behind the longest matches of the output's end; of two as long, the one closer to
        where it is expected comes first.
        """
        found = []
        for place in self._behind.get(self._output[-1], ()):
            length, distance = self._alike(place), abs(place - self.at)
            if length > 1 or distance <= NEAR:
                found.append((-length, distance, place))
        return [place for _, _, place in sorted(found)]

    def _alike(self, place: int) -> int:
        """How many tokens before `place` are those that the output ends with."""
        most = min(LONGEST, place, len(self._output))
        for length in range(1, most):
            if self.given[place - length - 1] != self._output[-length - 1]:
                return length
        return most
