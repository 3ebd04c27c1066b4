"""A decoder that gives its kernels a wrong thing, or takes a wrong one from them, is caught."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Wrong:
    """A piece of source replaced, who is given what the wrong module has, and where it shows."""

    module: str
    old: str
    new: str
    taken_by: str
    kind: str = "eagle3 tree"
    rule: str = "greedy"


JUDGE, READING = "engine.Judge", "drafters.HeadReading"
RANKING, BEAM, MEDUSA = "drafters.ranking_of_head", "drafters.draft_trees", "medusa.best_tokens"
BY_KERNEL = "return ByKernel(head.lm_head.weight, head.draft_ids, head.norm)"
ONE_MATRIX = "if len(matrices) == 1:\n        return matrices[0].best(states"
WRONG = {
    "a tree from its second node on": Wrong("judging", "[0, *accumulate", "[1, *accumulate", JUDGE),
    "rows that pad a path": Wrong(
        "judging", "accepted + 1], rest[most", "accepted + 2], rest[most", JUDGE
    ),
    "one token too few": Wrong("judging", "[len(a.output), a", "[len(a.output) + 1, a", JUDGE),
    "noise of another place": Wrong(
        "judging", "numbers[place] for place", "0 for place", JUDGE, "none", "sample"
    ),
    "nothing cut off": Wrong("judging", "kept == -math.inf", "kept != kept", JUDGE, "none", "cuts"),
    "rejected nodes": Wrong(
        "head_reading", "else rows\n", "else [max(r - 1, 0) for r in rows]\n", READING
    ),
    "logits for log-probabilities": Wrong(
        "ranking", "found.logits - found.lse[:, None]", "found.logits", RANKING
    ),
    "columns for ids": Wrong(
        "ranking", BY_KERNEL, BY_KERNEL.replace("head.draft_ids", "None"), RANKING, "eagle3 chain"
    ),
    "states without their norm": Wrong(
        "ranking", BY_KERNEL, BY_KERNEL.replace(", head.norm", ""), RANKING, "eagle3 chain"
    ),
    "children of the first node": Wrong(
        "beam",
        "expand(frontier.tokens, frontier.origins,",
        "expand(frontier.tokens, torch.zeros_like(frontier.origins),",
        BEAM,
    ),
    "ancestors of the node beside it": Wrong(
        "beam",
        "seen.gather(1, frontier.origins[:, :, None]",
        "seen.gather(1, 1 - frontier.origins[:, :, None]",
        BEAM,
    ),
    "roots of other requests": Wrong(
        "beam", "ends = torch.tensor(roots", "ends = 1 + torch.tensor(roots", BEAM
    ),
    "columns for ids of Medusa heads": Wrong(
        "medusa",
        "[ByKernel(module.weight, head.draft_ids) ",
        "[ByKernel(module.weight) ",
        MEDUSA,
        "medusa truncated",
    ),
    "one matrix for private heads": Wrong(
        "medusa", ONE_MATRIX, ONE_MATRIX.replace("== 1", ">= 1"), MEDUSA, "medusa private"
    ),
    "one head's state for all": Wrong(
        "medusa", ONE_MATRIX, f"{ONE_MATRIX}[:, :1].expand_as(states)", MEDUSA, "medusa shared"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_wiring_is_caught(name: str, caught: Any) -> None:
    case = WRONG[name]
    caught((case.module, case.old, case.new), case.taken_by, case.kind, case.rule)
