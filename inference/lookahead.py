"""Lookahead decoding (spec/medusa.md 5.1): the target guesses tokens further ahead beside every
pass, and the n-grams that come of it are verified later.

W window columns, N tokens of an n-gram, G guesses. Beside the root c, column 0 of level 0, stand
N - 1 levels of guessed tokens. Level 0 is a chain of W - 1 tokens behind c; from its column j hangs
what the levels above guessed for the tokens behind it. Seen from the root that is a tree, so window
and guesses are verified in the one pass of the engine, which gives back the target's likeliest
token behind each node. Those behind the last level are the new level; every column of the window
with its new token is an n-gram for the pool, under its first token; then the lowest level goes, and
with it the first column. Every pass is a step of Jacobi iteration on all columns at once.

Unlike the authors' code: nodes alike are one node; whatever the target confirms is kept, also a
path through the window and the token behind a whole guess (their pass commits at most N - 1); the
window begins with N - 1 levels of random prompt tokens, in place of N - 2 growing passes, and no
n-gram is read off it before all levels above the lowest are the target's; the random tokens are
the same in every run. The window moves on by one token a pass however many are committed, as theirs
does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from headsmith.inference.drafter_choice import Lookahead, check_draft
from headsmith.inference.drafters import Update, whole
from headsmith.inference.runs import Trie
from headsmith.inference.tree import Draft, Tree


class LookaheadDrafter:
    """Drafts the guesses for the root and the window, as one tree.

    Window and pool are made of the target's likeliest tokens under every rule, so what is drafted
    depends on no draw.
    """

    taps: tuple[int, ...] = ()
    reads_likeliest = True

    def __init__(self, choice: Lookahead, shape: Draft | None = None) -> None:
        check_draft(choice, shape)
        self.shape: Lookahead = choice
        self._running: dict[int, _Running] = {}

    def reset(self, slots: int, capacity: int) -> None:
        self._running = {}

    def release(self, slot: int) -> None:
        self._running.pop(slot, None)

    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        return [self._draft(update) for update in updates]

    def _draft(self, update: Update) -> Tree:
        if update.request is not None:
            self._running[update.slot] = _Running(self.shape, update.request.prompt_ids)
        running = self._running[update.slot]
        if update.likeliest is not None:
            running.window.step(update.likeliest, running.pool)
        if self.shape.from_prompt:
            running.read(whole(update))
        root = update.tokens[-1]
        trie = Trie(root, self.shape.nodes)
        for guess in running.pool.guesses(root):
            trie.add(guess)
        running.window.draw(root, trie)
        return trie.tree()


class Pool:
    """Up to `limit` continuations of a token, the latest seen first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[int, list[tuple[int, ...]]] = {}

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        known = self._known.setdefault(first, [])
        if rest in known:
            known.remove(rest)
        known.insert(0, rest)
        del known[self._limit :]

    def guesses(self, first: int) -> list[tuple[int, ...]]:
        return list(self._known.get(first, ()))


class Window:
    """The levels of guessed tokens: W - 1 of level 0, W of each other."""

    def __init__(self, shape: Lookahead, prompt: Sequence[int]) -> None:
        chooser = random.Random(0)
        sizes = [shape.window - 1, *[shape.window] * (shape.level - 2)]
        self.levels = [[chooser.choice(prompt) for _ in range(size)] for size in sizes]
        self._random = len(self.levels) - 1
        self._root, self._ends, self._nodes = 0, [0], 0

    def draw(self, root: int, trie: Trie) -> None:
        """Put the window into the tree, and remember where its columns end."""
        self._root = root
        self._ends = [trie.add(path) for path in self.paths()]
        self._nodes = len(trie)

    def paths(self) -> list[list[int]]:
        """Of each column, the tokens from the root to the last level."""
        spine, above = self.levels[0], self.levels[1:]
        return [
            [*spine[:column], *(level[column] for level in above)]
            for column in range(len(spine) + 1)
        ]

    def step(self, likeliest: Sequence[int], pool: Pool) -> None:
        """Read the new level off a verified tree, its n-grams into the pool, and move on."""
        if len(likeliest) != self._nodes:
            # The engine cut the tree at the end of the context: there is nothing left to look for.
            return
        new = [likeliest[end] for end in self._ends]
        spine, above = self.levels[0], self.levels[1:]
        if self._random == 0:
            for column, first in enumerate([self._root, *spine]):
                pool.add(first, (*(level[column] for level in above), new[column]))
        self._random = max(0, self._random - 1)
        self.levels = [*above, new]
        self.levels[0] = self.levels[0][1:]


class _Running:
    """What is kept of a request."""

    def __init__(self, shape: Lookahead, prompt: Sequence[int]) -> None:
        self.pool = Pool(shape.guesses)
        self.window = Window(shape, prompt)
        self._level = shape.level
        self._last: list[int] = []

    def read(self, tokens: Sequence[int]) -> None:
        """Put the n-grams of further text into the pool."""
        text = [*self._last, *tokens]
        for end in range(self._level, len(text) + 1):
            first, *rest = text[end - self._level : end]
            self.pool.add(first, tuple(rest))
        self._last = text[len(text) - self._level + 1 :] if len(text) >= self._level else text
