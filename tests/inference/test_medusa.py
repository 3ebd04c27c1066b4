"""Drafting with Medusa heads: trees by hand, the best tree by brute force, the target's text."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from headsmith.errors import HeadsmithError
from headsmith.inference.drafters import EagleDrafter, Update
from headsmith.inference.engine import Decoder
from headsmith.inference.equality import check_equality
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.medusa import MedusaDrafter
from headsmith.inference.rank_tree import build_tree, expected_tokens
from headsmith.inference.records import Request, Response
from headsmith.inference.tree import Calibrated, Chain, Draft, DynamicTree, RankTree, parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import Calibration, LmHead
from headsmith.models.target import Target

VOCAB, K = 96, 4
KINDS: list[LmHead] = ["shared", "private", "truncated"]
# All ten ranks of the first head, fewer of the later ones, short leaves among them.
WIDE = RankTree(
    tuple((a,) for a in range(10))
    + tuple((a, b) for a in range(3) for b in range(4))
    + ((0, 0, 0), (1, 2, 3), (0, 0, 0, 1))
)


@pytest.fixture(scope="module")
def target(tiny_tokenizer: Any, make_llama: Callable[..., LlamaForCausalLM]) -> Target:
    """float32; its id 0 is a token like any other and often the likeliest."""
    model = make_llama(
        seed=12,
        num_hidden_layers=3,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.no_grad():
        model.lm_head.weight[0] *= 2
    return Target(model, tiny_tokenizer, "zero")


def make_head(target: Target, kind: LmHead = "shared") -> MedusaHead:
    ids = torch.arange(0, VOCAB, 2) if kind == "truncated" else None
    head = MedusaHead.for_target(target, ids, num_heads=K, lm_head=kind)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.blocks.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return head


@pytest.fixture(scope="module")
def expected(target: Target, requests: list[Request]) -> list[Response]:
    """Plain decoding."""
    return Decoder(target, batch=len(requests), max_new_tokens=24).generate(requests)[0]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [Chain(1), Chain(K), WIDE], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets_own(
    kind: LmHead,
    shape: Draft,
    batch: int,
    target: Target,
    requests: list[Request],
    expected: list[Response],
) -> None:
    """Also where id 0 is what the target says at a short leaf of the tree (spec 3.4)."""
    said = [token for response in expected for token in response.output_ids]
    assert 5 < said.count(0) < 0.9 * len(said)
    drafter = make_drafter(make_head(target, kind), target, shape)
    decoder = Decoder(target, drafter, batch=batch, max_new_tokens=24)
    responses, _ = decoder.generate(requests)
    assert [r.output_ids for r in responses] == [r.output_ids for r in expected]
    assert check_equality(target, responses).fails == 0
    if shape is WIDE:
        assert max(p.accepted for r in responses for p in r.passes) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_trees_hold_the_ranked_tokens_of_each_head(
    kind: LmHead, target: Target, requests: list[Request]
) -> None:
    head, updates, states = make_head(target, kind), [], []
    for slot, request in enumerate(requests[:3]):
        ids = torch.tensor(request.prompt_ids)
        states.append(target.features(ids, [len(ids)], ()).last[-1].clone())
        updates.append(Update(slot, [7 + slot], torch.empty(1, 0, 32), states[-1]))
    trees = MedusaDrafter(head, target, WIDE).propose(updates)
    for tree, update, state in zip(trees, updates, states, strict=True):
        assert len(tree) == 1 + WIDE.nodes and tree.tokens[0] == update.tokens[-1]
        assert sorted(paths_of(tree.tokens, tree.parents, head, target, state)) == sorted(
            WIDE.paths
        )


def paths_of(
    tokens: list[int], parents: list[int], head: MedusaHead, target: Target, state: Tensor
) -> list[tuple[int, ...]]:
    """The rank path of every node, its ranks looked up in a sort of the head's logits."""
    order = []
    for k in range(K):
        logits = head.logits(k, head.state(k, state[None]), target)[0]
        order.append(head.draft_ids[logits.sort(descending=True, stable=True).indices].tolist())
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        above = paths[parent]
        paths.append((*above, order[len(above)].index(token)))
    return paths[1:]


def test_drafting_leaves_the_head_as_it_was_and_copies_no_shared_lm_head(target: Target) -> None:
    head = make_head(target)
    before = copy.deepcopy(head.state_dict())
    drafter = MedusaDrafter(head, target, Chain(2))
    assert all(torch.equal(before[name], t) for name, t in head.state_dict().items())
    assert all(p.requires_grad for p in head.parameters()) and head.training
    assert drafter.head.shared is target.head_weight


def every_tree(depth: int, ranks: int, nodes: int) -> list[frozenset[tuple[int, ...]]]:
    """All prefix-closed sets of up to `nodes` paths."""
    found: set[frozenset[tuple[int, ...]]] = {frozenset()}
    layer = {frozenset[tuple[int, ...]]()}
    for _ in range(nodes):
        grown = set()
        for tree in layer:
            for parent in {(), *tree}:
                if len(parent) < depth:
                    new = ((*parent, rank) for rank in range(ranks))
                    grown |= {tree | {path} for path in new if path not in tree}
        found, layer = found | grown, grown
    return [tree for tree in found if tree]


@pytest.mark.parametrize("seed", range(6))
def test_the_heap_builds_the_best_tree_of_every_budget(seed: int) -> None:
    """Against all trees there are; accuracies need not fall with the rank, and may be zero."""
    chooser = random.Random(seed)
    depth, ranks = (2, 3) if seed % 2 else (3, 2)
    accuracy = []
    for _ in range(depth):
        row = [chooser.random() * chooser.choice([0, 1, 1]) for _ in range(ranks)]
        accuracy.append([x / max(1.0, sum(row)) for x in row])
    accuracy[0][1] = 0.3
    trees = every_tree(depth, ranks, 5)
    assert len(trees) > 60
    for nodes in range(1, 6):
        allowed = [tree for tree in trees if len(tree) <= nodes]
        best = max(expected_tokens(accuracy, tree) for tree in allowed)
        built = build_tree(accuracy, nodes)
        assert built.nodes <= nodes
        assert expected_tokens(accuracy, built.paths) == pytest.approx(best, abs=1e-12)


def test_the_spec_example_of_budgets() -> None:
    """Ranks 0 to 4 of the published 7B heads, from their top-1 and top-5 rates as in spec 3.2: a
    chain of five gives 1.78 tokens a pass.
    """
    top1 = [0.560, 0.316, 0.201, 0.147, 0.118]
    accuracy = [[rate, 0.0] for rate in top1]
    assert expected_tokens(accuracy, RankTree.chain(5).paths) == pytest.approx(1.78, abs=0.005)
    assert build_tree(accuracy, 99).paths == RankTree.chain(5).paths


def test_nodes_that_are_worth_nothing_are_left_out() -> None:
    assert build_tree([[0.5, 0.0], [0.0, 0.0]], 9).paths == ((0,),)
    with pytest.raises(HeadsmithError, match="no draft of this head was ever right"):
        build_tree([[0.0, 0.0]], 9)


def test_a_tree_orders_its_paths_and_knows_its_sizes() -> None:
    tree = RankTree(((1,), (0, 2), (0,), (1, 0), (1, 0, 3)))
    assert tree.paths == ((0,), (1,), (0, 2), (1, 0), (1, 0, 3))
    assert (tree.nodes, tree.depth, tree.ranks, str(tree)) == (5, 3, 4, "medusa:5")
    assert tree.parents == [-1, 0, 0, 1, 2, 4]
    assert RankTree.chain(3).parents == [-1, 0, 1, 2]


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ((), "of no paths"),
        (((0,), (0,)), "with a path twice"),
        (((),), "of no paths, or with a path twice"),
        (((0,), (1, 0)), r"has \[1, 0\] without the path to it"),
    ],
)
def test_trees_that_are_none(paths: tuple[tuple[int, ...], ...], said: str) -> None:
    with pytest.raises(HeadsmithError, match=said):
        RankTree(paths)


def test_shapes_by_name() -> None:
    assert parse_shape("stored") == Calibrated() and str(Calibrated()) == "stored"
    assert parse_shape("medusa:16") == Calibrated(16) and str(Calibrated(16)) == "medusa:16"
    with pytest.raises(HeadsmithError, match="draft medusa:0: nodes is 0"):
        parse_shape("medusa:0")
    for text in ("medusa", "medusa:2,3", "stored:3"):
        with pytest.raises(HeadsmithError, match="medusa:NODES or stored"):
            parse_shape(text)


def test_the_stored_tree_and_smaller_ones_from_its_accuracies(target: Target) -> None:
    head = make_head(target)
    head.calibration = Calibration([[1], [0], [1, 0]], [[0.2, 0.5], [0.4, 0.1]], {})
    assert MedusaDrafter(head, target, Calibrated()).shape == RankTree(((0,), (1,), (1, 0)))
    assert MedusaDrafter(head, target, Calibrated(1)).shape == RankTree(((1,),))
    assert MedusaDrafter(head, target, Calibrated(4)).tree.nodes == 4


def deeper(head: MedusaHead) -> None:
    head.calibration = Calibration([[0] * m for m in range(1, K + 2)], [[0.5]] * (K + 1), {})


def wider(head: MedusaHead) -> None:
    head.calibration = Calibration([[VOCAB]], [[0.5]], {})


@pytest.mark.parametrize(
    ("shape", "change", "said"),
    [
        (Chain(K + 1), None, f"chain:5 goes 5 drafts deep and there are {K} Medusa heads"),
        (DynamicTree(9, 3, 3), None, "tree:9,3,3 needs a head that reads its own drafts"),
        (Calibrated(), None, "stored needs a tree stored with the head.*headsmith calibrate"),
        (Calibrated(8), None, "medusa:8 needs a tree stored with the head"),
        (Calibrated(), deeper, "stored goes 5 drafts deep"),
        (Calibrated(), wider, "asks for 97 tokens of a head and it can draft 96"),
    ],
)
def test_what_medusa_heads_cannot_draft(
    shape: Draft, change: Callable[[MedusaHead], None] | None, said: str, target: Target
) -> None:
    head = make_head(target)
    if change is not None:
        change(head)
    with pytest.raises(HeadsmithError, match=said):
        make_drafter(head, target, shape)


def test_an_eagle_head_has_no_stored_tree(small_target: Target) -> None:
    head = Eagle3Head.for_target(small_target, torch.arange(VOCAB), taps=(1, 3))
    assert isinstance(make_drafter(head, small_target, Chain(2)), EagleDrafter)
    for shape in (Calibrated(), Calibrated(3)):
        with pytest.raises(HeadsmithError, match="is a tree of a Medusa head, and this head is of"):
            make_drafter(head, small_target, shape)


def test_every_order_of_the_same_paths_is_the_same_tree() -> None:
    paths = [(0,), (1,), (0, 0)]
    assert len({RankTree(tuple(order)) for order in itertools.permutations(paths)}) == 1
