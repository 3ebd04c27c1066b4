"""Trees of drafters that propose whole runs of tokens, the best first: n-gram, given text,
Lookahead.
"""

from collections.abc import Iterable, Sequence

from headsmith.inference.tree import Chain, DynamicTree, Tree


class Trie:
    """A tree that grows run by run. Runs that begin alike share their nodes, so no two siblings
    hold the same token and no path is verified twice.
    """

    def __init__(self, root: int, limit: int) -> None:
        self._tokens, self._parents, self._limit = [root], [-1], limit
        self._children: dict[tuple[int, int], int] = {}

    def add(self, run: Iterable[int]) -> int:
        """The node of the run's last token, or of the last that found room."""
        node = 0
        for token in run:
            child = self._children.get((node, token))
            if child is None:
                if len(self._tokens) > self._limit:
                    break
                child = self._children[node, token] = len(self._tokens)
                self._tokens.append(token)
                self._parents.append(node)
            node = child
        return node

    def __len__(self) -> int:
        return len(self._tokens)

    def tree(self) -> Tree:
        return Tree(list(self._tokens), list(self._parents))


def tree_of_runs(root: int, runs: Iterable[Sequence[int]], shape: Chain | DynamicTree) -> Tree:
    """The first run as a chain, or the first `topk` that differ as a tree of at most `nodes` nodes.

    Runs are as deep as the shape, or less; none at all is a tree of the root alone.
    """
    trie, taken = Trie(root, shape.nodes), 0
    wanted = shape.topk if isinstance(shape, DynamicTree) else 1
    for run in runs:
        before = len(trie)
        trie.add(run)
        taken += len(trie) > before
        if taken == wanted or len(trie) > shape.nodes:
            break
    return trie.tree()
