"""Rounds of a decoder on the device: which requests they take, and what one round is.

Shapes: B requests of a bucket, N nodes of a tree, P tokens of the longest path, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.accept import Greedy, Rule, Sample, Typical
from headsmith.inference.active import Active, Kept
from headsmith.inference.cache import KeyValueCache
from headsmith.inference.drafters import Drafter
from headsmith.inference.judging import Judge
from headsmith.inference.kernels import runs, takes
from headsmith.inference.kernels.plan import Plan
from headsmith.inference.kernels.verify import REASONS, Nodes
from headsmith.inference.noise import Place, gumbel
from headsmith.inference.resident.drafting import Drafting, drafting_of
from headsmith.inference.resident.replay import Replay
from headsmith.inference.resident.state import COUNTS, State
from headsmith.inference.stages import stage, staged
from headsmith.models.prefix import Features
from headsmith.models.target import Target

# graph: rounds on the device, as CUDA graphs on a GPU. device: the same without graphs. host: the
# host makes the tables of every pass. The first two need the kernels.
VARIABLE = "HEADSMITH_ROUNDS"


def rounds_wanted() -> str:
    """What HEADSMITH_ROUNDS says."""
    wish = os.environ.get(VARIABLE, "graph")
    if wish not in ("graph", "device", "host"):
        raise HeadsmithError(f"{VARIABLE}={wish} is not one of graph, device, host")
    return wish


def drafting_on_device(target: Target, drafter: Drafter | None, rule: Rule) -> Drafting | None:
    """How rounds on the device would draft; None where rounds need the host: without kernels, for a
    target in shares, for rules and settings that look at the text, for other drafters.
    """
    if rounds_wanted() == "host" or not takes(target.head_weight) or target.shares is not None:
        return None
    if isinstance(rule, Greedy | Sample) and (rule.shaping.adjusts or rule.shaping.cuts):
        return None
    if not isinstance(rule, Greedy | Sample | Typical):
        return None
    return drafting_of(drafter)


def rounds_for(
    before: DeviceRounds | None,
    target: Target,
    drafter: Drafter | None,
    judge: Judge,
    batch: int,
) -> DeviceRounds | None:
    """The rounds on the device of a decoder, those that it had `before` if there were any; None
    where rounds need the host.
    """
    drafting = drafting_on_device(target, drafter, judge.rule)
    if drafting is None:
        return None
    taps = drafter.taps if drafter is not None else ()
    return before or DeviceRounds(target, drafting, taps, judge, batch)


@dataclass(frozen=True, slots=True)
class Told:
    """What the record of a round says of one request: what is kept, and of its tree the depth and
    the rows of the kept nodes in the round's states.
    """

    kept: Kept
    depth: int
    rows: list[int]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The rounds of up to B requests."""

    state: State
    draft: Replay
    verify: Replay


class DeviceRounds:
    """Rounds on the device for a decoder and its cache, whose last slot belongs to nobody: what
    fills up a bucket works there. A bucket has 1, 2, 4, ... requests, or as many as the decoder.
    """

    def __init__(
        self, target: Target, drafting: Drafting, taps: Sequence[int], judge: Judge, batch: int
    ) -> None:
        self.target, self.drafting, self.judge, self.batch = target, drafting, judge, batch
        self.cache = KeyValueCache(0, 0)
        self._drafter_cache = drafting.cache
        self._taps = tuple(taps)
        self._buckets: dict[int, Bucket] = {}
        self._bucket: Bucket | None = None
        self._known: list[tuple[int, int, int]] = []

    @property
    def states(self) -> Features:
        """Those of the last round's nodes: they are overwritten by the next."""
        assert self._bucket is not None
        return Features(self._bucket.state.taps, self._bucket.state.last)

    @property
    def drafts(self) -> int:
        """Nodes of a tree, the root excluded."""
        return self.drafting.nodes - 1

    def start(self, cache: KeyValueCache) -> None:
        """Begin with other requests, in this cache and that of the drafter; what was captured in
        others is forgotten.
        """
        self._known = []
        if cache is not self.cache or self.drafting.cache is not self._drafter_cache:
            self._buckets, self._bucket = {}, None
        self.cache, self._drafter_cache = cache, self.drafting.cache

    def take(self, active: Sequence[Active]) -> bool:
        """Whether a round of these requests can stay on the device; not while somebody times its
        stages, nor where a draft would lie beyond the target's context.
        """
        longest = max(a.length for a in active)
        return longest + self.drafting.depth <= self.target.max_context and not staged()

    def prepare(self, active: Sequence[Active]) -> None:
        """Have the bucket of so many requests ready: what is captured once is no round's time."""
        size = min(1 << (len(active) - 1).bit_length(), self.batch)
        if size not in self._buckets:
            self._buckets[size] = self._make(size)
        if self._bucket is not self._buckets[size]:
            self._bucket, self._known = self._buckets[size], []

    def draft(self, active: Sequence[Active]) -> None:
        """Draft a tree for each request; they are prepared."""
        assert self._bucket is not None
        known = [_key(a) for a in active]
        if known != self._known:
            self._load(active, self._bucket.state)
        self._bucket.draft()

    def verify(self, active: Sequence[Active]) -> None:
        """The target's pass over the trees, what is kept of them, and the next round's state."""
        assert self._bucket is not None
        if self._bucket.state.noise is not None:
            self._draw(active, self._bucket.state.noise)
        self._bucket.verify()

    def read(self, active: Sequence[Active]) -> list[Told]:
        """What was kept for each request: the only thing that the host reads of a round."""
        assert self._bucket is not None
        nodes, path = self.drafting.nodes, self._bucket.state.path
        told = []
        for i, row in enumerate(self._bucket.state.record.tolist()[: len(active)]):
            accepted, committed, reason, depth = row[:COUNTS]
            kept = row[COUNTS : COUNTS + accepted + 1]
            new = row[COUNTS + path : COUNTS + path + accepted + 1]
            ended = None if self.judge.stop.stop_strings else (committed, REASONS[reason])
            told.append(Told(Kept(kept, new, ended), depth, [i * nodes + node for node in kept]))
        return told

    def committed(self, active: Sequence[Active]) -> None:
        """The host has taken over what it read."""
        self._known = [_key(a) for a in active]
        for a in active:
            if a.finished is None and a.update is not None:
                self.drafting.follow(a.slot, a.length - 1 - len(a.update.tokens))

    def _load(self, active: Sequence[Active], state: State) -> None:
        """Bring the state of the device in line with what the host knows."""
        for a in active:
            assert a.update is not None
            if a.update.request is not None:
                a.update = replace(self.drafting.settle(a.update), request=None)
        state.load(active, self.batch)

    def _make(self, size: int) -> Bucket:
        """A bucket; while it is captured its requests are nobody's."""
        self.cache.clear(self.batch)
        drafting, drawn = self.drafting, isinstance(self.judge.rule, Sample)
        sizes = (size, drafting.nodes, drafting.depth + 1)
        state = State.empty(self.target, len(self._taps), sizes, self.batch, drawn)

        def draft() -> None:
            for kept, made in zip(state.tree, drafting.draft(state), strict=True):
                kept.copy_(made)

        def verify() -> None:
            self._verify(state)

        capture = rounds_wanted() == "graph"
        device = self.target.device
        return Bucket(state, Replay(draft, device, capture), Replay(verify, device, capture))

    def _verify(self, state: State) -> None:
        """One pass over all trees, and the state behind it."""
        runs("rounds on the device")
        (batch, nodes), path = state.tree.tokens.shape, state.path
        starts, tree = state.starts, state.tree
        depths = tree.positions - starts[:, None]
        words = None if self.drafting.chain else tree.words[:, :, None]
        plan = Plan.even(state.slots, starts, depths, words, self.cache.capacity)
        ids = tree.tokens.flatten()
        with stage("target pass"), self.cache.following(plan):
            found = self.target.run_at(ids, tree.positions.flatten(), self.cache, self._taps)
        order = torch.arange(batch + 1, device=ids.device)
        levels = (order[:-1, None] * path + depths).flatten()
        trees = Nodes(ids, tree.parents.flatten(), (order * nodes).int(), levels, nodes)
        said = self.judge.verdict(found.last, trees, state.noise, state.written, state.lengths)
        count = said.accepted + 1
        if not self.drafting.chain:
            with stage("compaction"):
                self.cache.compact(state.slots.int(), starts.int(), said.paths, count)
        paths, tokens = said.paths[:, :path].long(), said.tokens[:, :path]
        numbers = [said.accepted, said.committed, said.reasons, depths.amax(1)]
        state.record.copy_(torch.cat([torch.stack(numbers, 1).long(), paths, tokens], 1))
        # What fills up stays as it was, or it would leave its slot.
        state.lengths.add_(count * state.live)
        state.written.add_(count * state.live)
        state.counts.copy_(1 + said.accepted * state.live)
        state.tokens.copy_(tokens.clamp(min=0))
        state.rows.copy_(order[:-1, None] * nodes + paths.clamp(min=0))
        state.taps.copy_(found.taps)
        state.last.copy_(found.last)

    def _draw(self, active: Sequence[Active], noise: Tensor) -> None:
        """The noise of every place that a draft of each request can reach."""
        rule, path = self.judge.rule, self.drafting.depth + 1
        assert isinstance(rule, Sample)
        places = [Place(a.request.name, a.length + d) for a in active for d in range(path)]
        drawn = torch.stack([gumbel(rule.seed, place, noise.shape[1]) for place in places])
        noise[: len(drawn)].copy_(drawn)


def _key(a: Active) -> tuple[int, int, int]:
    """A request, where it is and how far it has come."""
    return a.index, a.slot, a.length
