"""The kernels of verification: one reads the logits, a program a node; one walks the trees, a
program a request, and looks for the end of the answer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headsmith.inference.kernels.aot import Specimen
from headsmith.inference.kernels.verify import Choose, Limits, Nodes, Verdict

BLOCK = 4096


@triton.jit
def _choose_kernel(
    logits,
    noise,
    levels,
    choices,
    sums,
    bars,
    vocab,
    temperature,
    threshold,
    alpha,
    SAMPLE: tl.constexpr,
    TYPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    here = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    # Softmax statistics of every lane, at the temperature; finite, so that no difference is NaN.
    high = tl.full([BLOCK], -1e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if SAMPLE:
        drawn = noise + tl.load(levels + row) * vocab
    for start in range(0, vocab, BLOCK):
        real = start + here < vocab
        score = tl.load(logits + row * vocab + start + here, mask=real, other=float("-inf"))
        score = score.to(tl.float32)
        if SAMPLE:
            # As the reference rounds it, or another token might win.
            score = tl.div_rn(score, temperature)
            score += tl.load(drawn + start + here, mask=real, other=0.0)
        if TYPICAL:
            warm = score / temperature
            higher = tl.maximum(high, warm)
            total = total * tl.exp(high - higher) + tl.exp(warm - higher)
            high = higher
        where = tl.where(score > top, start + here, where)
        top = tl.maximum(top, score)
    best = tl.max(top, 0)
    # Of equal scores the lower id.
    tl.store(choices + row, tl.min(tl.where(top == best, where, vocab), 0).to(tl.int64))
    if TYPICAL:
        peak = tl.max(high, 0)
        lse = peak + tl.log(tl.sum(total * tl.exp(high - peak), 0))
        spread = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            real = start + here < vocab
            score = tl.load(logits + row * vocab + start + here, mask=real, other=float("-inf"))
            p = tl.exp(score.to(tl.float32) / temperature - lse)
            spread += tl.where(real, p * tl.log(p + 1e-5), 0.0)
        tl.store(sums + row, lse)
        tl.store(bars + row, tl.minimum(alpha * tl.exp(tl.sum(spread, 0)), threshold))


@triton.jit
def _at(vector, node, index):
    """vector[index] for every index, of vectors in registers: [N]."""
    return tl.sum(tl.where(node[None, :] == index[:, None], vector[None, :], 0), 1)


@triton.jit
def _child(token, parent, node, live, at, choice, NODES: tl.constexpr):
    """The first child of node `at` that holds the choice, or NODES."""
    return tl.min(tl.where(live & (parent == at) & (token == choice), node, NODES), 0)


@triton.jit
def _accept_kernel(
    logits,
    tokens,
    parents,
    offsets,
    choices,
    sums,
    bars,
    written,
    lengths,
    stop_ids,
    out_paths,
    out_accepted,
    out_tokens,
    out_committed,
    out_reasons,
    out_lengths,
    vocab,
    most,
    stops,
    max_new_tokens,
    max_context,
    temperature,
    TYPICAL: tl.constexpr,
    NODES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + request)
    count = tl.load(offsets + request + 1) - begin
    node = tl.arange(0, NODES)
    live = node < count
    token = tl.load(tokens + begin + node, mask=live, other=-1)
    parent = tl.load(parents + begin + node, mask=live, other=-1)
    path = tl.where(node == 0, 0, tl.full([NODES], -1, tl.int32))
    new = tl.full([NODES], -1, tl.int64)
    kept = tl.zeros([], tl.int32)
    last = tl.zeros([], tl.int32)
    if TYPICAL:
        drafted = live & (node > 0)
        above = (begin + tl.where(drafted, parent, 0)).to(tl.int64)
        chance = tl.load(logits + above * vocab + token, mask=drafted, other=0.0).to(tl.float32)
        likely = chance / temperature - tl.load(sums + above, mask=drafted, other=0.0)
        passes = drafted & (tl.exp(likely) > tl.load(bars + above, mask=drafted, other=0.0))
        depth = tl.where(node == 0, 0, tl.full([NODES], -1, tl.int32))
        worth = tl.zeros([NODES], tl.float32)
        level = tl.zeros([], tl.int32)
        # Level by level, for as long as a level has nodes that can be reached.
        while (tl.max(depth, 0) == level) & (level < NODES):
            reached = passes & (_at((depth == level).to(tl.int32), node, parent) == 1)
            worth = tl.where(reached, _at(worth, node, parent) + likely, worth)
            level += 1
            depth = tl.where(reached, level, depth)
        kept = tl.max(depth, 0)
        value = tl.max(tl.where(depth == kept, worth, float("-inf")), 0)
        last = tl.min(tl.where((depth == kept) & (worth == value), node, NODES), 0)
        step, place = last, kept
        while place > 0:
            path = tl.where(node == place, step, path)
            mine = tl.sum(tl.where(node == step, token, 0), 0)
            new = tl.where(node == place - 1, mine, new)
            step = tl.sum(tl.where(node == step, parent, 0), 0)
            place -= 1
    else:
        choice = tl.load(choices + begin)
        child = _child(token, parent, node, live, last, choice, NODES)
        # Bounded, whatever the parents are: a kernel that does not end cannot be stopped.
        while (child < NODES) & (kept < NODES):
            new = tl.where(node == kept, choice, new)
            kept += 1
            path = tl.where(node == kept, child, path)
            last = child
            choice = tl.load(choices + begin + last)
            child = _child(token, parent, node, live, last, choice, NODES)
    new = tl.where(node == kept, tl.load(choices + begin + last), new)
    ours = node <= kept
    # Every token is looked at in turn: the first that ends the answer is its last.
    ended = tl.zeros([NODES], tl.int1)
    for s in range(stops):
        ended = ended | (new == tl.load(stop_ids + s))
    answer = tl.load(written + request) + node + 1
    whole = tl.load(lengths + request) + node + 1
    why = tl.where(whole >= max_context, 3, 0)
    why = tl.where(answer >= max_new_tokens, 2, why)
    why = tl.where(ended, 1, why)
    final = tl.min(tl.where(ours & (why > 0), node, NODES), 0)
    committed = tl.minimum(final, kept) + 1
    at = request * most + node
    inside = node < most
    tl.store(out_paths + at, path, mask=inside)
    tl.store(out_tokens + at, new, mask=inside)
    tl.store(out_accepted + request, kept)
    tl.store(out_committed + request, committed)
    tl.store(out_reasons + request, tl.sum(tl.where(node == final, why, 0), 0))
    tl.store(out_lengths + request, tl.load(lengths + request) + committed)


def launch(
    logits: Tensor,
    nodes: Nodes,
    choose: Choose,
    noise: Tensor | None,
    written: Tensor,
    lengths: Tensor,
    limits: Limits,
) -> Verdict:
    """verify.reference in two launches."""
    rows, vocab = logits.shape
    logits = logits.contiguous()
    typical = choose.rule == "typical"
    choices = nodes.tokens.new_empty(rows)
    sums, bars = logits.new_empty(2, rows, dtype=torch.float32)
    _choose_kernel[(rows,)](
        logits,
        logits if noise is None else noise,
        nodes.levels,
        choices,
        sums,
        bars,
        vocab,
        float(choose.temperature),
        float(choose.threshold),
        float(choose.typical.relaxation),
        SAMPLE=noise is not None,
        TYPICAL=typical,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
        num_warps=8,
    )
    warm = float(choose.temperature) if typical else None
    return _walk((logits, choices, sums, bars), nodes, written, lengths, limits, warm)


def launch_walk(
    choices: Tensor, nodes: Nodes, written: Tensor, lengths: Tensor, limits: Limits
) -> Verdict:
    """verify.reference_walk in one launch."""
    # Only typical acceptance reads logits and statistics.
    unread = choices.new_empty(1, 1, dtype=torch.float32)
    return _walk((unread, choices, unread, unread), nodes, written, lengths, limits, None)


def _walk(
    read: tuple[Tensor, Tensor, Tensor, Tensor],
    nodes: Nodes,
    written: Tensor,
    lengths: Tensor,
    limits: Limits,
    typical: float | None,
) -> Verdict:
    """Walk the trees by logits, choices, sums and bars; `typical` is the temperature of that rule,
    None for the others.
    """
    logits, choices, sums, bars = read
    batch = len(lengths)
    accepted, committed, reasons = (nodes.parents.new_empty(batch) for _ in range(3))
    paths = nodes.parents.new_empty(batch, nodes.most)
    tokens = nodes.tokens.new_empty(batch, nodes.most)
    verdict = Verdict(paths, accepted, tokens, committed, reasons, torch.empty_like(lengths))
    _accept_kernel[(batch,)](
        logits,
        nodes.tokens,
        nodes.parents,
        nodes.offsets,
        choices,
        sums,
        bars,
        written,
        lengths,
        limits.stop_ids,
        *verdict,
        logits.shape[1],
        nodes.most,
        len(limits.stop_ids),
        limits.max_new_tokens,
        limits.max_context,
        typical or 1.0,
        TYPICAL=typical is not None,
        NODES=max(2, triton.next_power_of_2(nodes.most)),
        num_warps=4,
    )
    return verdict


def specimens() -> list[Specimen]:
    """Trees of up to 64 nodes, logits in bfloat16."""
    floats = dict.fromkeys("temperature threshold alpha".split(), "fp32")
    reads = {
        "logits": "*bf16",
        "noise": "*fp32",
        **dict.fromkeys(("levels", "choices"), "*i64"),
        **dict.fromkeys(("sums", "bars"), "*fp32"),
        "vocab": "i32",
    }
    walks = {
        **{name: reads[name] for name in ("logits", "choices", "sums", "bars")},
        **dict.fromkeys("tokens written lengths stop_ids out_tokens out_lengths".split(), "*i64"),
        **dict.fromkeys("parents offsets out_paths out_accepted".split(), "*i32"),
        **dict.fromkeys("out_committed out_reasons".split(), "*i32"),
        **dict.fromkeys("vocab most stops max_new_tokens max_context".split(), "i32"),
        "temperature": "fp32",
    }
    found = []
    for rule in ("greedy", "sample", "typical"):
        typical = rule == "typical"
        choosing: dict[str, object] = {"SAMPLE": rule == "sample", "TYPICAL": typical}
        block: dict[str, object] = {"BLOCK": BLOCK}
        walking: dict[str, object] = {"TYPICAL": typical, "NODES": 64}
        label = f"verify.choose_{rule}"
        found.append(Specimen(label, _choose_kernel, reads | floats, choosing | block, 8, 2))
        if rule != "sample":
            name = f"verify.accept_{rule}"
            found.append(Specimen(name, _accept_kernel, walks, walking, 4, 2))
    return found
