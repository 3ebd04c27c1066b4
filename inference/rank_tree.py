"""Trees of rank paths: the best for a budget of nodes (spec/medusa.md 3.2), or one from a file."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from headsmith.errors import HeadsmithError
from headsmith.inference.tree import RankTree


def build_tree(accuracy: Sequence[Sequence[float]], nodes: int) -> RankTree:
    """The tree of at most `nodes` nodes whose expected number of accepted drafts is the highest.

    accuracy[i][r]: how often rank r of head i is right when the drafts before it were. A node is
    worth the product along its path; the best one next to the tree is taken until the budget is
    spent, which is optimal, for no node is worth more than its parent or a better sibling. Nodes
    that are worth nothing are left out. Raises HeadsmithError if that leaves none.
    """
    # Measured accuracies need not fall with the rank: the order of siblings is theirs, not ranks'.
    orders = [sorted(range(len(row)), key=lambda r: (-row[r], r)) for row in accuracy]
    sorted_accuracy = [[row[r] for r in order] for row, order in zip(accuracy, orders, strict=True)]
    # The heap holds minus the worth of a node, of its parent, and its path of places in the orders;
    # a chosen node opens its next sibling and its first child.
    heap: list[tuple[float, float, tuple[int, ...]]] = [(-sorted_accuracy[0][0], -1.0, (0,))]
    chosen: list[tuple[int, ...]] = []
    while heap and len(chosen) < nodes:
        worth, parent, path = heapq.heappop(heap)
        if worth == 0:
            break
        chosen.append(tuple(orders[i][place] for i, place in enumerate(path)))
        level, place = len(path) - 1, path[-1]
        if place + 1 < len(orders[level]):
            sibling = parent * sorted_accuracy[level][place + 1]
            heapq.heappush(heap, (sibling, parent, (*path[:-1], place + 1)))
        if level + 1 < len(accuracy):
            child = worth * sorted_accuracy[level + 1][0]
            heapq.heappush(heap, (child, worth, (*path, 0)))
    if not chosen:
        raise HeadsmithError(
            "no draft of this head was ever right, so there is no tree for it; train it longer"
        )
    return RankTree(tuple(chosen))


def expected_tokens(accuracy: Sequence[Sequence[float]], paths: Iterable[Sequence[int]]) -> float:
    """Tokens a pass if heads were independent: 1 + the sum over nodes of what each is worth."""
    total = 1.0
    for path in paths:
        worth = 1.0
        for level, rank in enumerate(path):
            worth *= accuracy[level][rank]
        total += worth
    return total


def read_static(path: str) -> RankTree:
    """The tree of `static:FILE`: a JSON list of rank paths such as [[0], [1], [0, 0]], or an object
    with such a list as `medusa_choices`. HeadsmithError says what is wrong with the file.
    """
    example = "write a list of rank paths, such as [[0], [1], [0, 0]]"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise HeadsmithError(
            f"the draft tree {path} cannot be read ({fault}); {example}"
        ) from fault
    paths = found.get("medusa_choices") if isinstance(found, dict) else found
    if not isinstance(paths, list) or not paths or not all(map(_is_path, paths)):
        raise HeadsmithError(f"the draft tree {path} is no list of lists of ranks; {example}")
    known = {(), *map(tuple, paths)}
    orphan = next((one for one in paths if tuple(one[:-1]) not in known), None)
    if orphan is not None:
        raise HeadsmithError(f"the draft tree {path} has {orphan} without the path to it; add that")
    if len(known) <= len(paths):
        raise HeadsmithError(f"the draft tree {path} has a path twice; name each once")
    return RankTree(tuple(map(tuple, paths)))


def _is_path(one: object) -> bool:
    ranks = one if isinstance(one, list) and one else [None]
    return all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks)
