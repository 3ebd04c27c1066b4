"""Lookahead decoding: who sees whom, what is read off a pass, and what the target really said."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from headsmith.errors import HeadsmithError
from headsmith.inference.drafter_choice import Lookahead
from headsmith.inference.drafters import Update
from headsmith.inference.engine import Decoder
from headsmith.inference.lookahead import LookaheadDrafter, Pool, Window
from headsmith.inference.records import Request
from headsmith.inference.runs import Trie
from headsmith.inference.tree import Chain, Tree
from headsmith.models.spans import Span
from headsmith.models.target import Target

# spec/medusa.md 5.1's worked example, W 3, N 4, one guess: a token is the number of its row there.
SHAPE = Lookahead(3, 4, 1)
VISIBLE = [
    {0},
    {0, 1},
    {0, 1, 2},
    {0, 3},
    {0, 1, 4},
    {0, 1, 2, 5},
    {0, 3, 6},
    {0, 1, 4, 7},
    {0, 1, 2, 5, 8},
    {0, 9},
    {0, 9, 10},
    {0, 9, 10, 11},
]
POSITIONS = [0, 1, 2, 1, 2, 3, 2, 3, 4, 1, 2, 3]


@pytest.fixture
def window() -> Window:
    """The window of the example, past its random beginning."""
    window = Window(SHAPE, [99])
    assert window.levels == [[99] * 2, [99] * 3, [99] * 3]
    window.levels, window._random = [[1, 2], [3, 4, 5], [6, 7, 8]], 0
    return window


@pytest.fixture
def tree(window: Window) -> Tree:
    trie = Trie(0, SHAPE.nodes)
    trie.add([9, 10, 11])
    window.draw(0, trie)
    return trie.tree()


def test_a_pass_sees_what_the_worked_example_sees(tree: Tree) -> None:
    assert sorted(tree.tokens) == list(range(12)) and len(tree) - 1 == SHAPE.nodes
    for token, depth, row in zip(tree.tokens, tree.depths, tree.ancestors, strict=True):
        assert {tree.tokens[i] for i in row.nonzero().flatten().tolist()} == VISIBLE[token]
        assert depth == POSITIONS[token]
    assert tree.depth == SHAPE.depth == 4


def test_the_n_grams_of_a_pass_and_the_next_window(window: Window, tree: Tree) -> None:
    pool = Pool(2)
    window.step([100 + token for token in tree.tokens], pool)
    assert [pool.guesses(first) for first in (0, 1, 2)] == [
        [(3, 6, 106)],
        [(4, 7, 107)],
        [(5, 8, 108)],
    ]
    assert window.levels == [[4, 5], [6, 7, 8], [106, 107, 108]]


def test_a_tree_that_was_cut_tells_nothing(window: Window, tree: Tree) -> None:
    pool, before = Pool(2), [list(level) for level in window.levels]
    window.step([0] * (len(tree) - 1), pool)
    assert window.levels == before and pool.guesses(0) == []


def test_nodes_alike_are_one_node() -> None:
    window = Window(SHAPE, [5])
    trie = Trie(5, SHAPE.nodes)
    trie.add([5, 5, 5])
    window.draw(5, trie)
    assert trie.tree().tokens == [5] * 5 and trie.tree().is_chain
    assert window._ends == [2, 3, 4]


def test_the_smallest_window_is_a_chain() -> None:
    """N 2: no level above the lowest; each column's new token is the n-gram's second."""
    window, pool, trie = Window(Lookahead(3, 2, 4), [7]), Pool(4), Trie(1, 99)
    window.levels = [[2, 3]]
    window.draw(1, trie)
    assert trie.tree().tokens == [1, 2, 3]
    window.step([11, 12, 13], pool)
    assert [pool.guesses(n) for n in (1, 2, 3)] == [[(11,)], [(12,)], [(13,)]]
    assert window.levels == [[12, 13]]


def test_the_pool_keeps_the_latest() -> None:
    pool = Pool(2)
    for rest in ((1,), (2,), (1,), (3,)):
        pool.add(0, rest)
    assert pool.guesses(0) == [(3,), (1,)] and pool.guesses(5) == []


def test_the_prompt_fills_the_pool_where_it_is_asked_to() -> None:
    drafter = LookaheadDrafter(Lookahead(2, 3, 2, from_prompt=True))
    request = Request("a", "task", [1, 2, 3, 1])
    drafter.propose([Update(0, [2, 3, 1, 2], torch.empty(0), request=request)])
    pool = drafter._running[0].pool
    assert pool.guesses(1) == [(2, 3)] and pool.guesses(3) == [(1, 2)]
    drafter.propose([Update(0, [9], torch.empty(0))])
    assert pool.guesses(1) == [(2, 9), (2, 3)]


class Watched(LookaheadDrafter):
    """Compares what it is told of every node with a pass over the node's whole text."""

    def __init__(self, shape: Lookahead, target: Target) -> None:
        super().__init__(shape)
        self.target = target
        self.seen: dict[int, tuple[list[int], Tree]] = {}
        self.compared = 0

    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        for update in updates:
            if update.likeliest is not None:
                self.compare(*self.seen[update.slot], update.likeliest)
        trees = super().propose(updates)
        for update, tree in zip(updates, trees, strict=True):
            before = update.request.prompt_ids[:1] if update.request else self.seen[update.slot][0]
            self.seen[update.slot] = ([*before, *update.tokens], tree)
        return trees

    def compare(self, text: list[int], tree: Tree, likeliest: list[int]) -> None:
        for node, said in enumerate(likeliest):
            path = [tree.tokens[i] for i in tree.ancestors[node].nonzero().flatten().tolist()]
            ids = torch.tensor([*text[:-1], *path])
            last = self.target.run(ids, [Span(len(ids))]).last[-1:]
            assert said == int(self.target.logits(last).argmax())
            self.compared += 1


def test_the_engine_says_what_the_target_says(
    small_target: Target, requests: list[Request]
) -> None:
    drafter = Watched(Lookahead(3, 3, 2), small_target)
    Decoder(small_target, drafter, batch=2, max_new_tokens=5).generate(requests[:3])
    assert drafter.compared > 40


class Shifted(LookaheadDrafter):
    """The bug: what is read off a node is what the target said of its neighbour."""

    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        for update in updates:
            if update.likeliest is not None:
                update.likeliest = [*update.likeliest[1:], update.likeliest[0]]
        return super().propose(updates)


@pytest.mark.parametrize("kind", [LookaheadDrafter, Shifted])
def test_n_grams_are_what_the_target_says(
    kind: type[LookaheadDrafter],
    make_llama: Any,
    tiny_tokenizer: Any,
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For this target the next token follows from the last alone. So every n-gram of a column holds
    but those of column 0, which the root has come under; read off the wrong nodes, few do.
    """
    model = make_llama(seed=5, num_hidden_layers=2, vocab_size=96, eos_token_id=None)
    for block in model.model.layers:
        torch.nn.init.zeros_(block.self_attn.o_proj.weight)
    target = Target(model.double(), tiny_tokenizer, "forgetful")
    ids = torch.arange(96)
    follows = target.logits(target.run(ids, [Span(1)] * 96).last).argmax(-1).tolist()
    added: list[bool] = []
    add = Pool.add

    def watch(pool: Pool, first: int, rest: tuple[int, ...]) -> None:
        added.append(all(follows[a] == b for a, b in pairwise([first, *rest])))
        add(pool, first, rest)

    monkeypatch.setattr(Pool, "add", watch)
    decoder = Decoder(target, kind(Lookahead(5, 4, 5)), batch=4, max_new_tokens=20)
    decoder.generate(requests)
    right = sum(added) / len(added)
    assert right >= 4 / 5 if kind is LookaheadDrafter else right < 1 / 2


def test_it_is_its_own_shape() -> None:
    with pytest.raises(HeadsmithError, match="not chain:4; leave --draft out"):
        LookaheadDrafter(Lookahead(), Chain(4))
