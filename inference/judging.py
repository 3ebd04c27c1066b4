"""What the target says of drafted trees: each rule's own way, or one pass of kernels over the whole
batch, which reads one small record at the end.

Shapes: n nodes of one tree, R of all, V target vocabulary, B requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch
from torch import Tensor

from headsmith.inference.accept import Greedy, Rule, Sample, Typical
from headsmith.inference.active import Active, Kept, Verified
from headsmith.inference.kernels import takes
from headsmith.inference.kernels.verify import REASONS, Choose, Limits, Nodes, Verdict, verify, walk
from headsmith.inference.noise import Place, gumbel
from headsmith.inference.processors import adjust
from headsmith.inference.ranking import is_bare, ranking_of_target
from headsmith.inference.sampling import PLAIN
from headsmith.inference.stages import stage
from headsmith.inference.stop import StopRule
from headsmith.inference.tree import Tree
from headsmith.models.target import Target


@dataclass(slots=True)
class Judge:
    """Judges trees by a rule. `reads_likeliest`: the drafter wants the target's likeliest tokens
    whatever the rule chooses.
    """

    target: Target
    rule: Rule
    stop: StopRule
    reads_likeliest: bool = False
    _limits: Limits | None = field(default=None, init=False)

    def judge(
        self, last: Tensor, ids: Tensor, active: Sequence[Active], trees: Sequence[Tree]
    ) -> list[Verified]:
        """What is said of each tree, from the last states [R, H] and the tokens int64 [R] of all
        nodes.
        """
        choose = choose_of(self.rule)
        if choose is not None and takes(last):
            return self._by_kernels(choose, last, ids, active, trees)
        return self._by_rule(last, ids, active, trees)

    def _by_rule(
        self, last: Tensor, ids: Tensor, active: Sequence[Active], trees: Sequence[Tree]
    ) -> list[Verified]:
        """Logits, choices and places, from which the rule will keep a path."""
        with stage("target lm_head"):
            logits = self.target.logits(last)
        places = [a.places(tree) for a, tree in zip(active, trees, strict=True)]
        sizes = [len(tree) for tree in trees]
        with stage("verify"):
            scores = self.rule.scores(logits, list(chain.from_iterable(places)))
            chosen = self.chosen(scores.argmax(-1), lambda: nodes_of(ids, trees))
            choices = chosen.cpu().split(sizes)
        judged = [
            Verified(rows, chosen.tolist(), where)
            for rows, chosen, where in zip(logits.split(sizes), choices, places, strict=True)
        ]
        if self.reads_likeliest:
            for one in judged:
                one.likeliest = one.logits.argmax(-1).tolist()
        return judged

    def _by_kernels(
        self,
        choose: Choose,
        last: Tensor,
        ids: Tensor,
        active: Sequence[Active],
        trees: Sequence[Tree],
    ) -> list[Verified]:
        """The paths kept, and where the answers end but for stop strings, which are text."""
        nodes = nodes_of(ids, trees)
        counts = [[len(a.output), a.length] for a in active]
        written, lengths = torch.tensor(counts, device=ids.device).T.contiguous()
        limits = self.limits(ids.device)
        likeliest: Tensor | None = None
        if self.by_ids:
            with stage("target lm_head"):
                likeliest = ranking_of_target(self.target).likeliest(last)
            with stage("verify"):
                choices = self.chosen(likeliest, lambda: nodes)
                judged = read(walk(choices, nodes, written, lengths, limits))
        else:
            with stage("target lm_head"):
                logits = self.target.logits(last)
            with stage("verify"):
                likeliest = logits.argmax(-1) if self.reads_likeliest else None
                places = [p for a, t in zip(active, trees, strict=True) for p in a.places(t)]
                noise, levels = noise_of(self.rule, places, logits)
                nodes, logits = nodes._replace(levels=levels), shaped(self.rule, logits, places)
                judged = read(verify(logits, nodes, choose, noise, written, lengths, limits))
        if self.stop.stop_strings:
            for one in judged:
                assert one.kept is not None
                one.kept.ended = None
        if self.reads_likeliest and likeliest is not None:
            sizes = [len(tree) for tree in trees]
            for one, said in zip(judged, likeliest.cpu().split(sizes), strict=True):
                one.likeliest = said.tolist()
        return judged

    @property
    def by_ids(self) -> bool:
        """The likeliest ids are all that is asked for: no logits are written."""
        plain = isinstance(self.rule, Greedy) and not self.rule.shaping.adjusts
        return plain and is_bare(self.target)

    def verdict(
        self,
        last: Tensor,
        nodes: Nodes,
        noise: Tensor | None,
        written: Tensor,
        lengths: Tensor,
    ) -> Verdict:
        """What is kept by a rule without settings of sampling, by the device alone: last states
        [R, H]; the others as in inference/kernels/verify.py.
        """
        choose, limits = choose_of(self.rule), self.limits(last.device)
        assert choose is not None, "a rule that the kernels know"
        if self.by_ids:
            with stage("target lm_head"):
                choices = self.chosen(ranking_of_target(self.target).likeliest(last), lambda: nodes)
            with stage("verify"):
                return walk(choices, nodes, written, lengths, limits)
        with stage("target lm_head"):
            logits = self.target.logits(last)
        with stage("verify"):
            return verify(logits, nodes, choose, noise, written, lengths, limits)

    def chosen(self, choices: Tensor, nodes: Callable[[], Nodes]) -> Tensor:
        """The choices int64 [R] as they are; benchmarks on random weights, which accept nothing,
        put others in their place. `nodes()` are the trees.
        """
        return choices

    def limits(self, device: torch.device) -> Limits:
        """Where answers end, on the device; made once."""
        if self._limits is None:
            ids = torch.tensor(sorted(self.stop.stop_ids), dtype=torch.int64, device=device)
            self._limits = Limits(ids, self.stop.max_new_tokens, self.stop.max_context)
        return self._limits


def choose_of(rule: Rule) -> Choose | None:
    """How the kernels accept like this rule; None for one that they do not know."""
    if isinstance(rule, Greedy):
        return Choose("greedy")
    if isinstance(rule, Sample):
        return Choose("sample", rule.temperature)
    if isinstance(rule, Typical):
        return Choose("typical", rule.temperature, rule.threshold, rule.alpha)
    return None


def nodes_of(ids: Tensor, trees: Sequence[Tree]) -> Nodes:
    """The trees as the kernels read them; ids int64 [R] are their tokens."""
    sizes = [len(tree) for tree in trees]
    table = [p for tree in trees for p in tree.parents] + [0, *accumulate(sizes)]
    on_device = torch.tensor(table, dtype=torch.int32, device=ids.device)
    parents, offsets = on_device[: len(ids)], on_device[len(ids) :]
    return Nodes(ids, parents, offsets.contiguous(), ids, max(sizes))


def noise_of(rule: Rule, places: Sequence[Place], like: Tensor) -> tuple[Tensor | None, Tensor]:
    """What rule `Sample` draws with: a row of noise for each distinct place, float32 [L, V], and
    which of them each node has, int64 [R]. None for other rules.
    """
    if not isinstance(rule, Sample):
        return None, torch.zeros(len(places), dtype=torch.int64, device=like.device)
    numbers = {place: i for i, place in enumerate(dict.fromkeys(places))}
    noise = torch.stack([gumbel(rule.seed, place, like.shape[1]) for place in numbers])
    levels = torch.tensor([numbers[place] for place in places], device=like.device)
    return noise.to(like.device), levels


def shaped(rule: Rule, logits: Tensor, places: Sequence[Place]) -> Tensor:
    """Logits [R, V] as the sampling settings leave them, before temperature."""
    shaping = rule.shaping if isinstance(rule, Greedy | Sample) else PLAIN
    adjusted = adjust(shaping, logits, places) if shaping.adjusts else logits
    if isinstance(rule, Sample) and shaping.cuts:
        kept = rule.log_weights(logits, places)
        adjusted = adjusted.masked_fill(kept == -math.inf, -math.inf)
    return adjusted


def read(verdict: Verdict) -> list[Verified]:
    """The record of a pass, brought to the host in one copy."""
    counts = torch.stack([verdict.accepted, verdict.committed, verdict.reasons], 1)
    record = torch.cat([counts.long(), verdict.paths.long(), verdict.tokens], 1).tolist()
    most = verdict.paths.shape[1]
    found = []
    for accepted, committed, reason, *rest in record:
        path, new = rest[: accepted + 1], rest[most : most + accepted + 1]
        found.append(Verified(kept=Kept(path, new, (committed, REASONS[reason]))))
    return found
