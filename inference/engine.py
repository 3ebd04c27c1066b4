"""The speculative decoder: prefill -> (draft -> verify -> accept -> commit)* for any number of
ragged requests.

Plain decoding is the same engine without a drafter. Requests share a pass, never a length: each has
its own slot in the cache, its position is its own committed length plus the node's depth, and a
finished request makes room at once for the next that has arrived. Prompts may be read in chunks, so
that a long one does not keep the others waiting.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.accept import GREEDY, Rule
from headsmith.inference.active import Active, Kept, Verified
from headsmith.inference.arrival import Arrival, Queue
from headsmith.inference.cache import KeyValueCache
from headsmith.inference.drafters import Drafter, Update
from headsmith.inference.judging import Judge
from headsmith.inference.kernels import watching
from headsmith.inference.prefill import longest_of, parts_of, read_prompts, refuse_nan
from headsmith.inference.records import FinishReason, Pass, Phases, Request, Response, Round
from headsmith.inference.resident.rounds import DeviceRounds, rounds_for
from headsmith.inference.stages import stage, timed
from headsmith.inference.stop import StopRule
from headsmith.inference.tree import Tree
from headsmith.models.prefix import Features
from headsmith.models.spans import Span
from headsmith.models.target import Target

# Rows that a cache is rounded up to where what is captured on its memory should live on.
ROOM = 512


class Decoder:
    """Decoding of requests by a rule, up to `batch` at a time, with or without a drafter.

    `prefill_chunk` bounds the prompt tokens of a pass (None: whole prompts); `arrival` says when
    requests come. After a call, `phases` and `rounds` hold what its time went into, and `kernels`
    the names of those that ran, in this call or an earlier one; what has no kernel there went
    through plain PyTorch.
    """

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
        arrival: Arrival | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        if prefill_chunk is not None and prefill_chunk < 1:
            raise HeadsmithError(f"prefill_chunk is {prefill_chunk}; it must be at least 1")
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
        self.rule, self.arrival, self.chunk = rule, arrival or Arrival(), prefill_chunk
        self.stop = StopRule(
            stop_ids=frozenset() if ignore_eos else frozenset(target.stop_ids),
            max_new_tokens=max_new_tokens,
            max_context=target.max_context,
            stop_strings=tuple(stop_strings),
            tokenizer=target.tokenizer,
        )
        self._taps = drafter.taps if drafter is not None else ()
        reads_likeliest = getattr(drafter, "reads_likeliest", False)
        self.judge = Judge(target, rule, self.stop, reads_likeliest)
        self.kernels: set[str] = set()
        self.phases = Phases()
        self.rounds: list[Round] = []
        self.cache = KeyValueCache(0, 0)
        self.device_rounds: DeviceRounds | None = None

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], on_response: Callable[[Response], None] | None = None
    ) -> tuple[list[Response], Phases]:
        """Decode all requests; responses come back in their order. `on_response` sees each as it
        finishes.

        Raises HeadsmithError when a prompt is empty or leaves no room in the target's context.
        """
        with watching() as ran:
            responses = self._decode(requests, on_response)
        self.kernels |= ran
        return responses, self.phases

    def _decode(
        self, requests: Sequence[Request], on_response: Callable[[Response], None] | None
    ) -> list[Response]:
        self._start(requests)
        queue = Queue(requests, self.arrival)
        active: list[Active] = []
        responses: list[Response | None] = [None] * len(requests)
        while queue or active:
            active = self._admit(queue, active)
            reading = [a for a in active if a.unread]
            if reading:
                self._prefill(reading)
            writing = [a for a in active if not a.unread and a.finished is None]
            if writing:
                self._step(writing)
            elif not active:
                queue.sleep()
            for done in (a for a in active if a.finished is not None):
                responses[done.index] = response = self._finish(done)
                if on_response is not None:
                    on_response(response)
            active = [a for a in active if a.finished is None]
        return [r for r in responses if r is not None]

    def _start(self, requests: Sequence[Request]) -> None:
        """Check the prompts and make the caches."""
        limit = self.target.max_context
        longest = longest_of(requests, limit)
        self._make_room(min(limit, longest + self.stop.max_new_tokens))
        self.phases, self.rounds = Phases(), []

    def _make_room(self, committed: int) -> None:
        """The caches for requests of up to so many tokens, and rounds on the device where they can
        be.
        """
        shape = self.drafter.shape if self.drafter is not None else None
        rows = committed + (shape.nodes if shape else 0) + 1
        # A beam search keeps topk nodes of each level behind the committed rows.
        drafted = max(shape.nodes, getattr(shape, "topk", 1) * shape.depth) if shape else 0
        slots = self.batch
        self.device_rounds = rounds_for(
            self.device_rounds, self.target, self.drafter, self.judge, self.batch
        )
        if self.device_rounds is None:
            self.cache = KeyValueCache(slots, rows)
        else:
            # One slot more, and room for longer requests: rounds are captured on this memory.
            more = -committed % ROOM
            slots, committed, rows = slots + 1, committed + more, rows + more
            self.cache = self.cache.fitting(slots, rows)
        if self.drafter is not None:
            self.drafter.reset(slots, committed + drafted + 1)
        if self.device_rounds is not None:
            self.device_rounds.start(self.cache)

    def _admit(self, queue: Queue, active: list[Active]) -> list[Active]:
        """The active requests and those that find a free slot, in the order of the slots."""
        free = sorted(set(range(self.batch)) - {a.slot for a in active})
        now = time.perf_counter()
        fresh = [
            Active(one.request, one.place, slot, now, now - one.arrived)
            for slot, one in zip(free, queue.take(len(free)), strict=False)
        ]
        return sorted(active + fresh, key=lambda a: a.slot)

    def _prefill(self, reading: list[Active]) -> None:
        """One pass over prompts, or over as much of them as a chunk holds, in the order of arrival.

        The state behind a prompt's end gives the request's first token, which is in no Pass.
        """
        with self._timed("prefill_s"):
            parts = parts_of(reading, self.chunk)
            whole, states = read_prompts(self.target, self.cache, self._taps, parts)
            if whole:
                self._begin(whole, torch.stack(states))

    def _begin(self, fresh: list[Active], states: Tensor) -> None:
        """Commit the first token of requests whose prompt is read; `states` [n, H] behind it."""
        logits = self.target.logits(states)
        refuse_nan(self.target, fresh, logits)
        places = [a.next_place() for a in fresh]
        first = self.rule.scores(logits, places).argmax(-1).tolist()
        for a, token, state in zip(fresh, first, states, strict=True):
            self._commit(a, [token])
            a.update = a.first_update(token, state)

    def _step(self, active: list[Active]) -> None:
        """One round for every active request: draft, verify, accept, commit."""
        before = replace(self.phases)
        if self.device_rounds is not None and self.device_rounds.take(active):
            self._step_on_device(active, self.device_rounds)
        else:
            with self._timed("draft_s"):
                trees = self._draft(active)
            with self._timed("verify_s"):
                states, verified = self._verify(active, trees)
            with self._timed("other_s"):
                self._accept(active, trees, states, verified)
        self.rounds.append(Round(len(active), self.phases - before))

    def _step_on_device(self, active: list[Active], rounds: DeviceRounds) -> None:
        """The same without the host, which reads what was kept."""
        rounds.prepare(active)
        with self._timed("draft_s"):
            rounds.draft(active)
        with self._timed("verify_s"):
            rounds.verify(active)
        with self._timed("other_s"):
            for a, told in zip(active, rounds.read(active), strict=True):
                self._keep(a, told.kept, (told.depth, rounds.drafts), rounds.states, told.rows)
            rounds.committed(active)

    def _draft(self, active: list[Active]) -> list[Tree]:
        if self.drafter is None:
            return [Tree([a.output[-1]], [-1]) for a in active]
        trees = self.drafter.propose([a.update for a in active if a.update is not None])
        # A node whose token would lie beyond the context could never be committed.
        return [
            tree.cut(self.target.max_context - a.length)
            for a, tree in zip(active, trees, strict=True)
        ]

    def _verify(self, active: list[Active], trees: list[Tree]) -> tuple[Features, list[Verified]]:
        """One target pass over all nodes of all trees: the states of all, what is said of each."""
        spans = [
            Span(len(tree), a.cached, a.slot)
            if tree.is_chain
            else Span(len(tree), a.cached, a.slot, tree.ancestors, torch.tensor(tree.depths))
            for a, tree in zip(active, trees, strict=True)
        ]
        ids = torch.tensor([t for tree in trees for t in tree.tokens], device=self.target.device)
        with stage("target pass"):
            states = self.target.run(ids, spans, self.cache, self._taps)
        return states, self.judge.judge(states.last, ids, active, trees)

    def _accept(
        self, active: list[Active], trees: list[Tree], states: Features, verified: list[Verified]
    ) -> None:
        """Commit the paths that the rule keeps and the token behind each."""
        first, moves = 0, []
        for a, tree, seen in zip(active, trees, verified, strict=True):
            with stage("verify"):
                kept = seen.keep(self.rule, tree)
            start, rows = a.cached, [first + node for node in kept.path]
            self._keep(a, kept, (tree.depth, len(tree) - 1), states, rows, seen.likeliest)
            if a.finished is None:
                moves.append((a.slot, start, kept.path))
            first += len(tree)
        with stage("compaction"):
            self.cache.keep_all(moves)

    def _keep(
        self,
        a: Active,
        kept: Kept,
        drafted: tuple[int, int],
        states: Features,
        rows: list[int],
        likeliest: list[int] | None = None,
    ) -> None:
        """Commit what is kept of a request's tree, of whose depth and number of drafts `drafted`
        tells; `rows` of `states` are the kept nodes'.
        """
        depth, drafts = drafted
        committed = self._commit(a, kept.new, kept.ended)
        a.passes.append(Pass(depth, len(kept.path) - 1, committed, drafts))
        if a.finished is not None:
            return
        a.cached += len(kept.path)
        assert a.cached == a.length - 1, "the cache holds all committed tokens but the root"
        last, place = states.last[rows[-1]], a.next_place()
        a.update = Update(
            a.slot, kept.new, states.taps, last, place, likeliest=likeliest, rows=rows
        )

    def _commit(
        self, a: Active, new: list[int], ended: tuple[int, FinishReason | None] | None = None
    ) -> int:
        """Append new tokens up to the first that ends the answer, which `ended` tells if it is
        known; returns how many.
        """
        if ended is None:
            committed, a.finished = self.stop.append(len(a.request.prompt_ids), a.output, new)
        else:
            committed, a.finished = ended
            a.output += new[:committed]
        a.times += [time.perf_counter() - a.started] * committed
        return committed

    def _finish(self, a: Active) -> Response:
        if self.drafter is not None:
            self.drafter.release(a.slot)
        return a.response()

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        return timed(self.phases, phase, self.target.device)
