"""The draft tree of Medusa heads, from text that the target itself wrote (spec/medusa.md 3.2).

Ranks are read from one pass over each greedy answer: which rank of head i is the token that the
target did write there. Passes of decoding do not start everywhere: each starts where the one before
it ended, in the mean at harder places, and a draft counts only if those before it were accepted. So
the accuracies are measured at the starts of the tree's own passes, given accepted ancestors, and
the tree is built again from them until it stays the same. Walking over the answers with the final
tree gives the tokens per pass that the verifier will measure on them.

Legend: K heads, R ranks that are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from headsmith.errors import HeadsmithError
from headsmith.inference.engine import Decoder
from headsmith.inference.measure import Progress
from headsmith.inference.medusa import best_tokens
from headsmith.inference.rank_tree import build_tree, expected_tokens
from headsmith.inference.records import Request, Response
from headsmith.inference.tree import RankTree
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import Calibration
from headsmith.models.spans import Span
from headsmith.models.target import Target

MAX_RANKS = 10
_ROUNDS = 8
# Rows of [K, V_d] logits that exist at a time.
_CHUNK = 64

# Rank of the right token in every head from one place on, as far as the answer goes.
Ranks = list[tuple[int, ...]]
Accuracy = list[list[float]]


@dataclass(slots=True)
class Walk:
    """Decoding an answer again: ranks at the start of each pass, drafts accepted, tokens kept."""

    starts: Ranks
    committed: int

    @property
    def tau(self) -> float:
        return self.committed / len(self.starts)


@torch.inference_mode()
def calibrate(
    head: MedusaHead,
    target: Target,
    requests: Sequence[Request],
    *,
    nodes: int,
    max_new_tokens: int = 128,
    batch: int = 8,
    on_progress: Progress | None = None,
) -> Calibration:
    """The best tree of at most `nodes` nodes for greedy decoding of the requests.

    `about` of the result has `predicted_tau`, tokens per pass of the tree on these answers, and
    `independent_tau`, what the accuracies alone would say. Raises HeadsmithError when there is no
    answer to measure on or no draft is ever right.
    """
    done = 0

    def count(response: Response) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, len(requests), "plain decoding")

    decoder = Decoder(target, batch=batch, max_new_tokens=max_new_tokens)
    responses, _ = decoder.generate(requests, count)
    answers = [ranks_of(head, target, response) for response in responses]
    if not any(answers):
        raise HeadsmithError(
            "the target answers none of the prompts with two tokens or more, so there is nothing "
            "to calibrate on; give other prompts or more --max-new-tokens"
        )
    tree, accuracy, walk = choose_tree(answers, head.config.num_heads, nodes)
    about = {
        "nodes": tree.nodes,
        "predicted_tau": walk.tau,
        "independent_tau": expected_tokens(accuracy, tree.paths),
        "passes": len(walk.starts),
        "prompts": len(responses),
        "tokens": sum(len(response.output_ids) for response in responses),
    }
    return Calibration([list(path) for path in tree.paths], accuracy, about)


def ranks_of(head: MedusaHead, target: Target, response: Response) -> Ranks:
    """Ranks at every place where a pass over this answer could start, in order.

    A pass whose root is output j drafts from the state of the token before it; place j of the
    result says how the heads rank outputs j + 1, j + 2, ... there.
    """
    prompt, output = response.request.prompt_ids, response.output_ids
    ids = torch.tensor([*prompt, *output], device=target.device)
    last = target.run(ids, [Span(len(ids))]).last[len(prompt) - 1 : len(ids) - 2]
    ranks, depth = min(MAX_RANKS, head.config.draft_vocab_size), head.config.num_heads
    best: list[list[list[int]]] = []
    for part in last.split(_CHUNK):
        best += best_tokens(head, target, part, depth, ranks).tolist()
    return [tuple(_ranks(ranked, output[j + 1 :])) for j, ranked in enumerate(best)]


def _ranks(ranked: Sequence[Sequence[int]], right: Sequence[int]) -> Iterator[int]:
    """Where the right tokens stand among the ranked ids [K, R]; MAX_RANKS for those that do not."""
    for row, token in zip(ranked, right, strict=False):
        yield row.index(token) if token in row else MAX_RANKS


def choose_tree(
    answers: Iterable[Ranks], num_heads: int, nodes: int
) -> tuple[RankTree, Accuracy, Walk]:
    """The tree that commits the most tokens a pass on the answers, the accuracies that it was built
    from, and its walk.
    """
    answers = list(answers)
    places = [place for answer in answers for place in answer]
    accuracy = conditional_accuracy(places, num_heads, frozenset())
    best: tuple[RankTree, Accuracy, Walk] | None = None
    seen: set[RankTree] = set()
    for _ in range(_ROUNDS):
        tree = build_tree(accuracy, nodes)
        if tree in seen:
            break
        seen.add(tree)
        walked = walk(answers, tree)
        if best is None or walked.tau > best[2].tau:
            best = tree, accuracy, walked
        accuracy = conditional_accuracy(walked.starts, num_heads, frozenset(tree.paths))
    assert best is not None
    return best


def conditional_accuracy(
    places: Ranks, num_heads: int, tree: frozenset[tuple[int, ...]]
) -> Accuracy:
    """[K][R]: how often each rank of a head was right, over the places where the drafts before it
    were accepted by `tree`. The best child of an accepted node counts as in the tree, so that heads
    deeper than it are measured too.
    """
    hits = [[0] * MAX_RANKS for _ in range(num_heads)]
    reached = [0] * num_heads
    for place in places:
        for level, rank in enumerate(place):
            reached[level] += 1
            if rank < MAX_RANKS:
                hits[level][rank] += 1
            if rank > 0 and place[: level + 1] not in tree:
                break
    return [[hit / max(n, 1) for hit in row] for row, n in zip(hits, reached, strict=True)]


def walk(answers: Iterable[Ranks], tree: RankTree) -> Walk:
    """Go over the answers as decoding with the tree does: a pass commits its accepted drafts and
    one more token, as far as the answer goes, and the next one starts there.
    """
    paths = frozenset(tree.paths)
    starts: Ranks = []
    committed = 0
    for answer in answers:
        at = 0
        while at < len(answer):
            place = answer[at]
            accepted = next(
                (m for m in range(len(place)) if place[: m + 1] not in paths), len(place)
            )
            step = min(accepted + 1, len(answer) - at)
            starts.append(place)
            committed, at = committed + step, at + step
    return Walk(starts, committed)
