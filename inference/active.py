"""A request while it is decoded, and what the target says of a tree drafted for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headsmith.inference.accept import Rule
from headsmith.inference.drafters import Update
from headsmith.inference.noise import Place
from headsmith.inference.records import FinishReason, Pass, Request, Response
from headsmith.inference.tree import Tree

NOTHING = torch.empty(0)


@dataclass(slots=True)
class Active:
    """A request that is being decoded. `cached` tokens are in the target's cache: of the prompt
    while it is read, then all committed ones but the root. `taps` [n, m, H] each of the parts of
    the prompt that were read; `queued` seconds passed between its arrival and `started`.
    """

    request: Request
    index: int
    slot: int
    started: float
    queued: float = 0.0
    cached: int = 0
    output: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)
    finished: FinishReason | None = None
    update: Update | None = None

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.output)

    @property
    def unread(self) -> int:
        """Tokens of the prompt that the target has not seen yet."""
        return max(0, len(self.request.prompt_ids) - self.cached)

    def places(self, tree: Tree) -> list[Place]:
        """Where the tokens behind each node of a tree stand, whose root is the last committed
        token.
        """
        request, written = self.request, self.output
        return [
            Place(request.name, self.length + len(path), request.prompt_ids, written, path)
            for path in tree.paths
        ]

    def next_place(self) -> Place:
        """Where the next token stands."""
        request = self.request
        return Place(request.name, self.length, request.prompt_ids, self.output)

    def first_update(self, token: int, last: Tensor) -> Update:
        """What the drafter learns of the prompt: all its rows, however many passes read them.

        `token` is the one behind the prompt, `last` [H] the state that it was chosen from.
        """
        tokens = [*self.request.prompt_ids[1:], token]
        taps, self.taps = torch.cat(self.taps), []
        return Update(self.slot, tokens, taps, last, self.next_place(), self.request)

    def response(self) -> Response:
        """What a finished request gave."""
        assert self.finished is not None
        first, last = self.times[0], self.times[-1]
        return Response(
            self.request,
            self.output,
            self.finished,
            self.passes,
            first,
            last - first,
            self.times,
            self.queued,
        )


@dataclass(slots=True)
class Kept:
    """What a tree gave: the nodes `path` that are kept, the root first, the tokens behind the root,
    the target's own last; `ended` how many of those count and why the answer ends, or None where
    that is still to be found out.
    """

    path: list[int]
    new: list[int]
    ended: tuple[int, FinishReason | None] | None = None


@dataclass(slots=True)
class Verified:
    """What the target says of a tree of n nodes: what is `kept`, or what the rule needs to tell,
    logits [n, V], its choice behind each node and their places; the target's likeliest tokens
    where the drafter reads them.
    """

    logits: Tensor = NOTHING
    choices: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    likeliest: list[int] | None = None
    kept: Kept | None = None

    def keep(self, rule: Rule, tree: Tree) -> Kept:
        """The path to keep and the tokens that it commits."""
        if self.kept is not None:
            return self.kept
        accepted = rule.accept(tree, self.logits, self.choices, self.places)
        path = accepted.path
        return Kept(path, [*(tree.tokens[node] for node in path[1:]), accepted.bonus])
