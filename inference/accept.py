"""Acceptance rules: which path of a verified tree is kept, and which token the target adds
(spec/verifier.md 3).
"""

from dataclasses import dataclass

from headsmith.inference.tree import Tree


@dataclass(frozen=True, slots=True)
class Accepted:
    """`path` are the accepted nodes, the root first; `bonus` is the target's token behind the last
    of them.
    """

    path: list[int]
    bonus: int


def accept_greedy(tree: Tree, predictions: list[int]) -> Accepted:
    """Follow the target's argmax from the root for as long as a child holds it (spec/verifier.md
    3.1).

    `predictions[i]` is the target's argmax behind node i. Only the argmax is ever followed, so the
    text is the target's own greedy text.
    """
    node, path = 0, [0]
    while True:
        following = next(
            (c for c in tree.children[node] if tree.tokens[c] == predictions[node]), None
        )
        if following is None:
            return Accepted(path, predictions[node])
        node = following
        path.append(node)
