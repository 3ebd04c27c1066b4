"""The speculative decoder: prefill -> (draft -> verify -> accept -> commit)* for any number of
ragged requests.

Plain decoding is the same engine without a drafter. Requests share a pass, never a length: each has
its own slot in the cache, its position is its own committed length plus the node's depth, and a
finished request makes room for the next.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.accept import GREEDY, Rule
from headsmith.inference.cache import KeyValueCache
from headsmith.inference.drafters import Drafter, Update
from headsmith.inference.noise import Place
from headsmith.inference.records import FinishReason, Pass, Phases, Request, Response
from headsmith.inference.stop import StopRule
from headsmith.inference.tree import Tree
from headsmith.models.prefix import Features
from headsmith.models.spans import Span
from headsmith.models.target import Target


@dataclass(slots=True)
class _Active:
    """A request that is being decoded. `cached` tokens are in the target's cache: all committed but
    the root.
    """

    request: Request
    index: int
    slot: int
    started: float
    cached: int = 0
    output: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    finished: FinishReason | None = None
    update: Update | None = None

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.output)

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


@dataclass(slots=True)
class _Verified:
    """What the target says of a tree of n nodes: logits [n, V], the rule's choice behind each node
    and its place, the states of each; its likeliest tokens where the drafter reads them.
    """

    logits: Tensor
    choices: list[int]
    places: list[Place]
    states: Features
    likeliest: list[int] | None = None


class Decoder:
    """Decoding of requests by a rule, up to `batch` at a time, with or without a drafter."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        batch: int = 1,
        max_new_tokens: int = 128,
        stop_strings: Sequence[str] = (),
        ignore_eos: bool = False,
        rule: Rule = GREEDY,
    ) -> None:
        if batch < 1 or max_new_tokens < 1:
            raise HeadsmithError(
                f"batch {batch} and max_new_tokens {max_new_tokens} must be at least 1"
            )
        if drafter is not None and drafter.shape.depth >= target.max_context:
            raise HeadsmithError(
                f"draft {drafter.shape} goes {drafter.shape.depth} tokens deep and the target's "
                f"context holds {target.max_context}; draft less"
            )
        self.target, self.drafter, self.batch = target, drafter, batch
        self.rule = rule
        self.stop = StopRule(
            stop_ids=frozenset() if ignore_eos else frozenset(target.stop_ids),
            max_new_tokens=max_new_tokens,
            max_context=target.max_context,
            stop_strings=tuple(stop_strings),
            tokenizer=target.tokenizer,
        )
        self._taps = drafter.taps if drafter is not None else ()
        self._reads_likeliest = getattr(drafter, "reads_likeliest", False)
        self.phases = Phases()

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], on_response: Callable[[Response], None] | None = None
    ) -> tuple[list[Response], Phases]:
        """Decode all requests; responses come back in their order. `on_response` sees each as it
        finishes.

        Raises HeadsmithError when a prompt is empty or leaves no room in the target's context.
        """
        self._start(requests)
        waiting = deque(enumerate(requests))
        active: list[_Active] = []
        responses: list[Response | None] = [None] * len(requests)
        while waiting or active:
            free = sorted(set(range(self.batch)) - {a.slot for a in active})
            fresh = [self._admit(*waiting.popleft(), slot) for slot in free[: len(waiting)]]
            if fresh:
                self._prefill(fresh)
            else:
                self._step(active)
            active = sorted(active + fresh, key=lambda a: a.slot)
            for done in (a for a in active if a.finished is not None):
                responses[done.index] = response = self._finish(done)
                if on_response is not None:
                    on_response(response)
            active = [a for a in active if a.finished is None]
        return [r for r in responses if r is not None], self.phases

    def _start(self, requests: Sequence[Request]) -> None:
        """Check the prompts and make the caches."""
        limit = self.target.max_context
        for request in requests:
            if not 0 < len(request.prompt_ids) < limit:
                raise HeadsmithError(
                    f"prompt {request.id} has {len(request.prompt_ids)} tokens; between 1 and "
                    f"{limit - 1} fit the target's context"
                )
        longest = max((len(r.prompt_ids) for r in requests), default=0)
        committed = min(limit, longest + self.stop.max_new_tokens)
        shape = self.drafter.shape if self.drafter is not None else None
        self.cache = KeyValueCache(self.batch, committed + (shape.nodes if shape else 0) + 1)
        if self.drafter is not None and shape is not None:
            # A beam search keeps topk nodes of each level behind the committed rows.
            drafted = max(shape.nodes, getattr(shape, "topk", 1) * shape.depth)
            self.drafter.reset(self.batch, committed + drafted + 1)
        self.phases = Phases()

    def _admit(self, index: int, request: Request, slot: int) -> _Active:
        return _Active(request, index, slot, time.perf_counter())

    def _prefill(self, fresh: list[_Active]) -> None:
        """One pass over the whole prompts; its last state gives each request's first token, which
        is in no Pass.
        """
        with self._timed("prefill_s"):
            spans = [Span(len(a.request.prompt_ids), 0, a.slot) for a in fresh]
            ids = torch.tensor(
                [t for a in fresh for t in a.request.prompt_ids], device=self.target.device
            )
            features = self.target.run(ids, spans, self.cache, self._taps)
            last = torch.tensor([s.length for s in spans], device=ids.device).cumsum(0) - 1
            logits = self.target.logits(features.last[last])
            self._refuse_nan(fresh, logits)
            places = [a.next_place() for a in fresh]
            first = self.rule.scores(logits, places).argmax(-1).tolist()
            taps = features.taps.split([s.length for s in spans])
            for a, token, tapped, state in zip(
                fresh, first, taps, features.last[last], strict=True
            ):
                a.cached = len(a.request.prompt_ids)
                self._commit(a, [token])
                tokens = [*a.request.prompt_ids[1:], token]
                a.update = Update(a.slot, tokens, tapped, state, a.next_place(), a.request)

    def _refuse_nan(self, fresh: list[_Active], logits: Tensor) -> None:
        """NaN in a prompt's states reaches all that follows, so looking here is enough."""
        for a, finite in zip(fresh, logits.isfinite().all(-1).tolist(), strict=True):
            if not finite:
                raise HeadsmithError(
                    f"the logits of the target {self.target.path} for prompt {a.request.id} hold "
                    "NaN or infinity; try float32, or get the target's weights again"
                )

    def _step(self, active: list[_Active]) -> None:
        """One round for every active request: draft, verify, accept, commit."""
        with self._timed("draft_s"):
            trees = self._draft(active)
        with self._timed("verify_s"):
            verified = self._verify(active, trees)
        with self._timed("other_s"):
            for a, tree, seen in zip(active, trees, verified, strict=True):
                self._accept(a, tree, seen)

    def _draft(self, active: list[_Active]) -> list[Tree]:
        if self.drafter is None:
            return [Tree([a.output[-1]], [-1]) for a in active]
        trees = self.drafter.propose([a.update for a in active if a.update is not None])
        # A node whose token would lie beyond the context could never be committed.
        return [
            tree.cut(self.target.max_context - a.length)
            for a, tree in zip(active, trees, strict=True)
        ]

    def _verify(self, active: list[_Active], trees: list[Tree]) -> list[_Verified]:
        """One target pass over all nodes of all trees."""
        spans = [
            Span(len(tree), a.cached, a.slot)
            if tree.is_chain
            else Span(len(tree), a.cached, a.slot, tree.ancestors, torch.tensor(tree.depths))
            for a, tree in zip(active, trees, strict=True)
        ]
        ids = torch.tensor([t for tree in trees for t in tree.tokens], device=self.target.device)
        features = self.target.run(ids, spans, self.cache, self._taps)
        logits = self.target.logits(features.last)
        places = [a.places(tree) for a, tree in zip(active, trees, strict=True)]
        sizes = [len(tree) for tree in trees]
        scores = self.rule.scores(logits, list(chain.from_iterable(places)))
        choices = scores.argmax(-1).cpu().split(sizes)
        states = map(Features, features.taps.split(sizes), features.last.split(sizes))
        verified = [
            _Verified(rows, chosen.tolist(), where, seen)
            for rows, chosen, where, seen in zip(
                logits.split(sizes), choices, places, states, strict=True
            )
        ]
        if self._reads_likeliest:
            for one in verified:
                one.likeliest = one.logits.argmax(-1).tolist()
        return verified

    def _accept(self, a: _Active, tree: Tree, seen: _Verified) -> None:
        """Commit the path that the rule keeps and the token behind it."""
        accepted = self.rule.accept(tree, seen.logits, seen.choices, seen.places)
        path = accepted.path
        new = [*(tree.tokens[node] for node in path[1:]), accepted.bonus]
        committed = self._commit(a, new)
        a.passes.append(Pass(tree.depth, len(path) - 1, committed, len(tree) - 1))
        if a.finished is None:
            self.cache.keep(a.slot, a.cached, path)
            a.cached += len(path)
            assert a.cached == a.length - 1, "the cache holds every committed token but the root"
            taps, last = seen.states.taps[path], seen.states.last[path[-1]]
            place, likeliest = a.next_place(), seen.likeliest
            a.update = Update(a.slot, new, taps, last, place, likeliest=likeliest)

    def _commit(self, a: _Active, new: list[int]) -> int:
        """Append new tokens up to the first that ends the answer; returns how many."""
        committed, a.finished = self.stop.append(len(a.request.prompt_ids), a.output, new)
        a.times += [time.perf_counter() - a.started] * committed
        return committed

    def _finish(self, a: _Active) -> Response:
        assert a.finished is not None
        if self.drafter is not None:
            self.drafter.release(a.slot)
        first, last = a.times[0], a.times[-1]
        return Response(a.request, a.output, a.finished, a.passes, first, last - first, a.times)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the wall time of a block to a phase, the device's work included."""
        self._synchronise()
        begin = time.perf_counter()
        yield
        self._synchronise()
        setattr(self.phases, phase, getattr(self.phases, phase) + time.perf_counter() - begin)

    def _synchronise(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
