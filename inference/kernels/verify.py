"""What the target says of a batch of trees: the path to keep, the token behind it, where the answer
ends; and the plain reference, which is the rules of `headsmith.inference.accept` and the stop rule.

Shapes: B requests, R nodes of all trees (no padding), V target vocabulary, P most nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headsmith.inference.accept import POSTERIOR_THRESHOLD, Accepted, Typical, follow
from headsmith.inference.kernels import runs, use_kernels
from headsmith.inference.records import FinishReason
from headsmith.inference.stop import StopRule
from headsmith.inference.tree import Tree

# Why an answer ends, as a number in `Verdict.reasons`. Stop strings are text: the host looks.
REASONS: tuple[FinishReason | None, ...] = (None, "eos", "length", "context")
# What fills up rows of tokens and of nodes.
NONE = -1


class Nodes(NamedTuple):
    """The trees, one behind the other: `tokens` int64 [R], `parents` int32 [R] (in the tree, -1 of
    its root), `offsets` int32 [B + 1] where each begins; `levels` int64 [R] which row of the noise
    each node's next token is drawn with (that of its place), read by `sample` alone. `most` is P.
    """

    tokens: Tensor
    parents: Tensor
    offsets: Tensor
    levels: Tensor
    most: int


class Choose(NamedTuple):
    """How drafts are accepted; see `headsmith.inference.accept`. `alpha` is that of `Typical`."""

    rule: Literal["greedy", "sample", "typical"] = "greedy"
    temperature: float = 1.0
    threshold: float = POSTERIOR_THRESHOLD
    alpha: float | None = None

    @property
    def typical(self) -> Typical:
        return Typical(self.temperature, self.threshold, self.alpha)


class Limits(NamedTuple):
    """Where answers end: `stop_ids` int64 [S], new tokens, positions of prompt and answer."""

    stop_ids: Tensor
    max_new_tokens: int
    max_context: int


class Verdict(NamedTuple):
    """paths int32 [B, P] nodes kept, the root first; accepted int32 [B] drafts among them; tokens
    int64 [B, P] what follows the root, the target's own last; committed int32 [B] how many of those
    count; reasons int32 [B] why the answer ends (`REASONS`); lengths int64 [B] tokens of prompt and
    answer now. Rows are filled up with -1.
    """

    paths: Tensor
    accepted: Tensor
    tokens: Tensor
    committed: Tensor
    reasons: Tensor
    lengths: Tensor


def verify(
    logits: Tensor,
    nodes: Nodes,
    choose: Choose,
    noise: Tensor | None,
    written: Tensor,
    lengths: Tensor,
    limits: Limits,
) -> Verdict:
    """Accept by the rule `choose` from the target's logits [R, V].

    `noise` float32 [L, V], for `sample`, is `headsmith.inference.noise.gumbel` of the places that
    `Nodes.levels` names; logits are as the sampling settings left them, before temperature.
    `written` int64 [B] are the tokens of each answer so far and `lengths` int64 [B] those of prompt
    and answer, the root counted.
    """
    assert (noise is not None) == (choose.rule == "sample"), "rule sample draws, no other does"
    if use_kernels(logits.device):
        from headsmith.inference.kernels.verify_triton import launch

        runs("verify")
        return launch(logits, nodes, choose, noise, written, lengths, limits)
    return reference(logits, nodes, choose, noise, written, lengths, limits)


def walk(
    choices: Tensor, nodes: Nodes, written: Tensor, lengths: Tensor, limits: Limits
) -> Verdict:
    """The same where the target's choices int64 [R] behind all nodes are known: drafts are kept for
    as long as they are chosen.
    """
    if use_kernels(choices.device):
        from headsmith.inference.kernels.verify_triton import launch_walk

        runs("verify")
        return launch_walk(choices, nodes, written, lengths, limits)
    return reference_walk(choices, nodes, written, lengths, limits)


def reference(
    logits: Tensor,
    nodes: Nodes,
    choose: Choose,
    noise: Tensor | None,
    written: Tensor,
    lengths: Tensor,
    limits: Limits,
) -> Verdict:
    """The same request by request, by the rules that the decoder uses."""
    scores = logits.float()
    if noise is not None:
        scores = scores / choose.temperature + noise[nodes.levels]
    choices = scores.argmax(-1)
    if choose.rule != "typical":
        return reference_walk(choices, nodes, written, lengths, limits)
    chosen = choices.tolist()

    def keep(tree: Tree, rows: slice) -> Accepted:
        return choose.typical.accept(tree, logits[rows], chosen[rows])

    return _each(keep, nodes, written, lengths, limits)


def reference_walk(
    choices: Tensor, nodes: Nodes, written: Tensor, lengths: Tensor, limits: Limits
) -> Verdict:
    """`walk` request by request."""
    chosen = choices.tolist()
    return _each(lambda tree, rows: follow(tree, chosen[rows]), nodes, written, lengths, limits)


def _each(
    keep: Callable[[Tree, slice], Accepted],
    nodes: Nodes,
    written: Tensor,
    lengths: Tensor,
    limits: Limits,
) -> Verdict:
    """What `keep` keeps of each tree, given its rows among all, and where its answer ends."""
    batch, device = len(lengths), lengths.device
    paths = torch.full((batch, nodes.most), NONE, dtype=torch.int32, device=device)
    tokens = torch.full((batch, nodes.most), NONE, dtype=torch.int64, device=device)
    counts = torch.zeros(3, batch, dtype=torch.int32, device=device)
    stop = frozenset(limits.stop_ids.tolist())
    for i, (begin, done, length) in enumerate(
        zip(nodes.offsets.tolist(), written.tolist(), lengths.tolist(), strict=False)
    ):
        rows = slice(begin, int(nodes.offsets[i + 1]))
        tree = Tree(nodes.tokens[rows].tolist(), nodes.parents[rows].tolist())
        kept = keep(tree, rows)
        new = [*(tree.tokens[node] for node in kept.path[1:]), kept.bonus]
        # The rule looks at the answer's length and its last token alone.
        rule = StopRule(stop, limits.max_new_tokens, limits.max_context)
        committed, reason = rule.append(length - done, [NONE] * done, new)
        paths[i, : len(kept.path)] = torch.tensor(kept.path, dtype=torch.int32)
        tokens[i, : len(new)] = torch.tensor(new)
        counts[:, i] = torch.tensor([len(kept.path) - 1, committed, REASONS.index(reason)])
    accepted, committed, reasons = counts
    return Verdict(paths, accepted, tokens, committed, reasons, lengths + committed)
