"""The kernels of tree building: a program a request, everything in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headsmith.inference.kernels.aot import Specimen
from headsmith.inference.kernels.tree_build import Candidates, Frontier, Trees, first_of


@triton.jit
def _clean(scores):
    """NaN ranks last, as in the reference."""
    return tl.where(scores == scores, scores, float("-inf"))


@triton.jit
def _grow_kernel(
    ids,
    logp,
    before_scores,
    before_numbers,
    found_tokens,
    found_scores,
    found_parents,
    next_tokens,
    next_scores,
    next_numbers,
    next_origins,
    count,
    candidates,
    first,
    K: tl.constexpr,
    ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    here = tl.arange(0, BLOCK)
    real = here < count
    origin = here // K
    tokens = tl.load(ids + request * count + here, mask=real, other=0)
    scores = tl.load(logp + request * count + here, mask=real, other=0.0)
    parents = tl.full([BLOCK], -1, tl.int64)
    if not ROOT:
        scores += tl.load(before_scores + request * K + origin, mask=real, other=0.0)
        parents = tl.load(before_numbers + request * K + origin, mask=real, other=0)
    at = request * candidates + first + here
    tl.store(found_tokens + at, tokens, mask=real)
    tl.store(found_scores + at, scores, mask=real)
    tl.store(found_parents + at, parents, mask=real)
    left = real
    ranked = _clean(scores)
    for rank in range(K):
        # The best that is left; of equal ones, -inf among them, the lowest number.
        high = tl.max(tl.where(left, ranked, float("-inf")), 0)
        best = tl.min(tl.where(left & (ranked == high), here, BLOCK), 0)
        chosen = here == best
        out = request * K + rank
        tl.store(next_tokens + out, tl.sum(tl.where(chosen, tokens, 0), 0))
        score = tl.load(logp + request * count + best)
        if not ROOT:
            score += tl.load(before_scores + request * K + best // K)
        tl.store(next_scores + out, score)
        tl.store(next_numbers + out, (first + best).to(tl.int64))
        tl.store(next_origins + out, (best // K).to(tl.int64))
        left = left & (here != best)


@triton.jit
def _build_kernel(
    found_tokens,
    found_scores,
    found_parents,
    roots,
    lengths,
    out_tokens,
    out_parents,
    out_positions,
    out_words,
    candidates,
    nodes,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    base = request * candidates
    node = tl.arange(0, NODES)
    # Node n > 0 is the n-th chosen candidate; node 0, the root, is candidate -1.
    numbers = tl.full([NODES], -1, tl.int32)
    above = tl.full([NODES], -1, tl.int32)
    tokens = tl.zeros([NODES], tl.int64)
    taken = tl.zeros([], tl.int32)
    for start in range(0, candidates, BLOCK):
        mine = start + tl.arange(0, BLOCK)
        real = mine < candidates
        score = _clean(tl.load(found_scores + base + mine, mask=real, other=float("-inf")))
        better = tl.zeros([BLOCK], tl.int32)
        for other in range(0, candidates, BLOCK):
            theirs = other + tl.arange(0, BLOCK)
            there = theirs < candidates
            rival = tl.load(found_scores + base + theirs, mask=there, other=float("-inf"))
            rival = _clean(rival)
            ahead = rival[None, :] > score[:, None]
            ahead = ahead | ((rival[None, :] == score[:, None]) & (theirs[None, :] < mine[:, None]))
            better += tl.sum((ahead & there[None, :]).to(tl.int32), 1)
        kept = (real & (better < nodes)).to(tl.int32)
        place = taken + tl.cumsum(kept, 0)
        goes = (place[None, :] == node[:, None]) & (kept[None, :] == 1)
        token = tl.load(found_tokens + base + mine, mask=kept == 1, other=0)
        parent = tl.load(found_parents + base + mine, mask=kept == 1, other=0).to(tl.int32)
        # -1 stands in all three already, so what is added is one too many.
        numbers += tl.sum(tl.where(goes, mine[None, :] + 1, 0), 1)
        above += tl.sum(tl.where(goes, parent[None, :] + 1, 0), 1)
        tokens += tl.sum(tl.where(goes, token[None, :], 0), 1)
        taken += tl.sum(kept, 0)
    drafted = (node > 0) & (node <= nodes)
    root = tl.load(roots + request)
    tokens = tl.where(node == 0, root, tokens)
    # The node of the parent's candidate; the root has number -1, as have nodes that are not there.
    same = (numbers[None, :] == above[:, None]) & (drafted[None, :] | (node[None, :] == 0))
    parents = tl.sum(tl.where(same, node[None, :], 0), 1)
    words = tl.full([NODES], 1, tl.int64) << node.to(tl.int64)
    depths = tl.zeros([NODES], tl.int32)
    climbing = parents
    on_the_way = drafted
    step = tl.zeros([], tl.int32)
    # Bounded, whatever the parents are: a kernel that does not end cannot be stopped.
    while (tl.max(on_the_way.to(tl.int32), 0) > 0) & (step < nodes):
        step += 1
        words = tl.where(on_the_way, words | (tl.full([NODES], 1, tl.int64) << climbing), words)
        depths += on_the_way.to(tl.int32)
        on_the_way = on_the_way & (climbing > 0)
        climbing = tl.sum(tl.where(node[None, :] == climbing[:, None], parents[None, :], 0), 1)
    at = request * (nodes + 1) + node
    inside = node <= nodes
    tl.store(out_tokens + at, tokens, mask=inside)
    tl.store(out_parents + at, tl.where(node == 0, -1, parents), mask=inside)
    tl.store(out_positions + at, tl.load(lengths + request) + depths, mask=inside)
    tl.store(out_words + at, words, mask=inside)


def launch_grow(
    ids: Tensor, logp: Tensor, before: Frontier | None, found: Candidates, level: int
) -> Frontier:
    """tree_build.reference_grow in one launch."""
    batch, nodes, k = ids.shape
    ids, logp = ids.contiguous(), logp.float().contiguous()
    tokens = ids.new_empty(batch, k)
    out = Frontier(tokens, logp.new_empty(batch, k), *map(torch.empty_like, (tokens, tokens)))
    _grow_kernel[(batch,)](
        ids,
        logp,
        logp if before is None else before.scores,
        ids if before is None else before.numbers,
        *found,
        *out,
        nodes * k,
        found.scores.shape[1],
        first_of(level, k),
        K=k,
        ROOT=before is None,
        BLOCK=triton.next_power_of_2(nodes * k),
        num_warps=4,
    )
    return out


def launch_build(found: Candidates, roots: Tensor, lengths: Tensor, nodes: int) -> Trees:
    """tree_build.reference_build in one launch."""
    batch, candidates = found.scores.shape
    tokens = roots.new_empty(batch, nodes + 1)
    parents = torch.empty_like(tokens, dtype=torch.int32)
    out = Trees(tokens, parents, *map(torch.empty_like, (tokens, tokens)))
    _build_kernel[(batch,)](
        *found,
        roots,
        lengths,
        *out,
        candidates,
        nodes,
        BLOCK=min(64, max(16, triton.next_power_of_2(candidates))),
        NODES=triton.next_power_of_2(nodes + 1),
        num_warps=8,
    )
    return out


def specimens() -> list[Specimen]:
    """tree:60,10,8."""
    pointers = {
        **dict.fromkeys("ids before_numbers found_tokens found_parents".split(), "*i64"),
        **dict.fromkeys("logp before_scores found_scores next_scores".split(), "*fp32"),
        **dict.fromkeys("next_tokens next_numbers next_origins".split(), "*i64"),
    }
    numbers = dict.fromkeys("count candidates first".split(), "i32")
    sizes: dict[str, object] = {"K": 10, "ROOT": False, "BLOCK": 128}
    build = {
        **dict.fromkeys("found_tokens found_parents roots lengths".split(), "*i64"),
        "found_scores": "*fp32",
        **dict.fromkeys("out_tokens out_positions out_words".split(), "*i64"),
        "out_parents": "*i32",
        **dict.fromkeys("candidates nodes".split(), "i32"),
    }
    blocks: dict[str, object] = {"BLOCK": 64, "NODES": 64}
    return [
        Specimen("tree_build.grow", _grow_kernel, pointers | numbers, sizes, 4, 2),
        Specimen("tree_build.build", _build_kernel, build, blocks, 8, 2),
    ]
