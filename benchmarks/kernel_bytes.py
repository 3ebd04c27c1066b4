"""The bytes each kernel must move and moves, at the shapes of Llama-3.1-8B in bfloat16, batch 1:
`python benchmarks/kernel_bytes.py`. No GPU: Triton's interpreter runs the kernels and every load
and store is counted.

least: each input that is needed once, each output once.
requested: all loads and stores, those of the kernel's scratch included.
memory: the same without what the second-level cache (40 MB on an A100, more on later cards)
answers: repeated reads of a tensor of at most 16 MB, scratch, which the next launch reads at once,
and a row that its own program reads twice on end (rule typical: 61 rows of logits are 31 MB).

To keep the interpreter's time short, attention runs one of the eight key/value heads and the
matrices run a part of their rows; their bytes are scaled to the whole.
"""

import os

# Before Triton is imported.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["HEADSMITH_KERNELS"] = "on"

import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import dataclass  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from headsmith.inference.kernels.compaction import Stores, compact  # noqa: E402
from headsmith.inference.kernels.head_input import attention_input, fuse_rows  # noqa: E402
from headsmith.inference.kernels.interpreter import exchange_once  # noqa: E402
from headsmith.inference.kernels.lm_head import best_tokens  # noqa: E402
from headsmith.inference.kernels.plan import Plan  # noqa: E402
from headsmith.inference.kernels.traffic import SCRATCH, counting  # noqa: E402
from headsmith.inference.kernels.tree_attention import tree_attention  # noqa: E402
from headsmith.inference.kernels.tree_build import Candidates, Frontier, build, grow  # noqa: E402
from headsmith.inference.kernels.verify import Choose, Limits, Nodes, verify  # noqa: E402
from headsmith.models.spans import Span  # noqa: E402

RESIDENT = 16 * 2**20
LIMIT = 1.2
WIDTH, HEADS, KEY_HEADS, D = 4096, 32, 8, 128
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A kernel at one shape: what runs, on which tensors, how many of it make the whole, which of
    the tensors there is but one of, the least bytes of the whole, and the tensors whose rows are
    read twice on end.
    """

    name: str
    run: Callable[[], dict[str, Tensor]]
    tensors: dict[str, Tensor]
    scale: int
    shared: tuple[str, ...]
    least: int
    on_end: tuple[str, ...] = ()


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def measured(case: Case) -> tuple[int, int]:
    """Bytes requested and bytes from memory."""
    with counting() as traffic:
        outputs = case.run()
    moved = traffic.by_tensor(case.tensors | outputs)
    requested = sum(moved.values()) * case.scale
    memory = 0
    for name, tensor in (case.tensors | outputs).items():
        whole = tensor.untyped_storage().nbytes() * (1 if name in case.shared else case.scale)
        asked = moved[name] * case.scale
        cached = whole <= RESIDENT or name in case.on_end
        memory += min(asked, whole) if cached else asked
    assert set(moved) <= {*case.tensors, *outputs, SCRATCH}
    return requested, memory


def tree(nodes: int) -> tuple[Tensor, Tensor]:
    """Ancestors and depths of a tree whose nodes hang three to a parent."""
    seen, depths = torch.eye(nodes, dtype=torch.bool), torch.zeros(nodes, dtype=torch.int64)
    for node in range(1, nodes):
        seen[node] |= seen[(node - 1) // 3]
        depths[node] = depths[(node - 1) // 3] + 1
    return seen, depths


def attention(nodes: int, prefix: int, is_tree: bool) -> Case:
    """One layer: the tree or chain of one request behind its prefix."""
    seen, depths = tree(nodes) if is_tree else (None, None)
    plan = Plan.of([Span(nodes, prefix, 0, seen, depths)], CPU)
    group = HEADS // KEY_HEADS
    query, keys = zeros(group, nodes, D), zeros(1, 1, prefix + nodes, D)
    values = keys.clone()
    tensors = {"query": query, "keys": keys, "values": values}
    tables = {"requests": plan.requests, "words": plan.words, "depths": plan.depths}
    least = KEY_HEADS * sum(t.nbytes for t in (query, query, keys, values))
    return Case(
        f"tree attention, {'tree' if is_tree else 'chain'} of {nodes} behind {prefix:,}",
        lambda: {"out": tree_attention(query, keys, values, plan)},
        tensors | tables | {"owner": plan.owner},
        KEY_HEADS,
        (*tables, "owner"),
        least,
    )


def compaction(path: list[int]) -> Case:
    """The accepted path of one request in 32 layers."""
    stores = Stores.of([zeros(1, KEY_HEADS, 128, D) for _ in range(64)])[0]
    tables = [torch.tensor(t, dtype=torch.int32) for t in ([0], [7], [path], [len(path)])]
    slots, starts, paths, counts = tables

    def run() -> dict[str, Tensor]:
        compact(stores, slots, starts, paths, counts)
        return {}

    moved = sum(node != i for i, node in enumerate(path))
    names = dict(zip(("slots", "starts", "paths", "counts"), tables, strict=True))
    tensors = names | {"pointers": stores.pointers}
    tensors |= {f"store{i}": t for i, t in enumerate(stores.tensors)}
    least = 2 * moved * 64 * KEY_HEADS * D * 2
    return Case(f"cache compaction, {moved} nodes moved, 32 layers", run, tensors, 1, (), least)


def fc(rows: int) -> Case:
    """Three taps of the accepted rows through their norms and fc."""
    parts = 16
    taps, weight, norms = zeros(64, 3, WIDTH), zeros(WIDTH // parts, 3 * WIDTH), zeros(3, WIDTH)
    chosen = torch.arange(rows)
    tensors = {"taps": taps[:rows].clone(), "weight": weight, "norms": norms, "rows": chosen}
    least = weight.nbytes * parts + rows * 4 * WIDTH * 2 + norms.nbytes
    return Case(
        f"gather, tap norms and fc, {rows} rows",
        lambda: {"out": fuse_rows(tensors["taps"], chosen, weight, norms)},
        tensors,
        parts,
        ("taps", "norms", "rows"),
        least,
    )


def concatenation(rows: int) -> Case:
    """Embedding norm, hidden norm, side by side."""
    embeds, z, first, second = zeros(rows, WIDTH), zeros(rows, WIDTH), zeros(WIDTH), zeros(WIDTH)
    tensors = {"embeds": embeds, "z": z, "embed_norm": first, "hidden_norm": second}
    return Case(
        f"embedding norm, hidden norm and concatenation, {rows} rows",
        lambda: {"out": attention_input(embeds, z, first, second)},
        tensors,
        1,
        (),
        2 * embeds.nbytes + 2 * z.nbytes + first.nbytes + second.nbytes,
    )


def lm_head(name: str, rows: int, vocab: int, parts: int, k: int, mapped: bool) -> Case:
    """The output matrix of a draft head or of the target."""
    x, weight = zeros(rows, WIDTH), zeros(vocab // parts, WIDTH)
    ids = torch.arange(len(weight)) if mapped else None
    tensors = {"x": x, "weight": weight} | ({} if ids is None else {"ids": ids})

    def run() -> dict[str, Tensor]:
        return best_tokens(x, weight, k, ids)._asdict()

    least = weight.nbytes * parts + x.nbytes + rows * (k * 12 + 4) + (rows * k * 8 if mapped else 0)
    shared = ("x", "ids", "logits", "lse")
    return Case(f"{name} lm_head, {rows} rows, best {k}", run, tensors, parts, shared, least)


def level(topk: int, depth: int) -> Case:
    """A level of the beam of one request."""
    ids, logp = torch.zeros(1, topk, topk, dtype=torch.int64), torch.zeros(1, topk, topk)
    numbers = torch.zeros(1, topk, dtype=torch.int64)
    before = Frontier(numbers, torch.zeros(1, topk), numbers.clone(), numbers.clone())
    found = Candidates.empty(1, topk, depth, CPU)
    tensors = {"ids": ids, "logp": logp, "scores": before.scores, "numbers": before.numbers}
    tensors |= {f"found {name}": tensor for name, tensor in found._asdict().items()}
    # Read: ids and scores of the children, scores and numbers of their parents. Written: the
    # children with their parents, and the frontier.
    least = topk * topk * (8 + 4 + 8 + 4 + 8) + topk * (4 + 8) + topk * (8 + 4 + 8 + 8)
    return Case(
        f"tree build, a level of {topk} times {topk}",
        lambda: {f"next {n}": t for n, t in grow(ids, logp, before, found, 1)._asdict().items()},
        tensors,
        1,
        (),
        least,
    )


def finished(nodes: int, topk: int, depth: int) -> Case:
    """The tree of one request from all candidates of its beam."""
    found = Candidates.empty(1, topk, depth, CPU)
    torch.manual_seed(0)
    found.scores.uniform_()
    roots = torch.zeros(1, dtype=torch.int64)
    tensors = {"roots": roots, "lengths": roots.clone(), **found._asdict()}
    # Scores of all candidates, tokens and parents of those chosen; tokens, parents, positions and
    # words are written.
    count = found.scores.shape[1]
    least = count * 4 + nodes * 16 + 16 + (nodes + 1) * (8 + 4 + 8 + 8)
    return Case(
        f"tree build, {nodes} of {count} candidates",
        lambda: {f"out {n}": t for n, t in build(found, roots, roots, nodes)._asdict().items()},
        tensors,
        1,
        (),
        least,
    )


def accept(rule: Choose, nodes: int, vocab: int, depth: int) -> Case:
    """What is kept of one tree, from the logits of its nodes (float32)."""
    seen, depths = tree(nodes)
    parents = torch.tensor([-1, *((node - 1) // 3 for node in range(1, nodes))], dtype=torch.int32)
    ids, offsets = torch.zeros(nodes, dtype=torch.int64), torch.tensor([0, nodes]).int()
    levels = depths.clamp(max=depth)
    trees = Nodes(ids, parents, offsets, levels, nodes)
    logits, one = torch.zeros(nodes, vocab), torch.ones(1, dtype=torch.int64)
    noise = torch.zeros(depth + 1, vocab) if rule.rule == "sample" else None
    limits = Limits(torch.tensor([vocab - 1]), 1000, 100000)
    tensors = {"logits": logits, "ids": ids, "parents": parents, "offsets": offsets}
    tensors |= {"levels": levels, "lengths": one, "written": one.clone(), "stops": limits[0]}
    tensors |= {} if noise is None else {"noise": noise}
    least = logits.nbytes + (0 if noise is None else noise.nbytes) + nodes * (8 + 4)
    return Case(
        f"verify, rule {rule.rule}, {nodes} rows",
        lambda: (
            verify(logits, trees, rule, noise, tensors["written"], one, limits)._asdict()
            | {"written": tensors["written"], "lengths": one}
        ),
        tensors,
        1,
        (),
        least,
        ("logits",) if rule.rule == "typical" else (),
    )


def cases() -> Iterator[Case]:
    for prefix in (2048, 8192, 32768):
        yield attention(61, prefix, True)
        yield attention(8, prefix, False)
    yield attention(1, 2048, False)
    yield compaction([0, 2, 5, 11, 30, 44])
    yield fc(6)
    yield concatenation(10)
    yield lm_head("draft", 1, 32000, 50, 10, True)
    yield lm_head("draft", 10, 32000, 50, 10, True)
    yield lm_head("target", 1, 128256, 334, 1, False)
    yield lm_head("target", 61, 128256, 167, 1, False)
    yield level(10, 8)
    yield finished(60, 10, 8)
    for rule in ("greedy", "sample", "typical"):
        yield accept(Choose(rule), 61, 128256, 8)


def main() -> None:
    """Print the table; exit 1 if a kernel moves more than 1.2 times the least from memory."""
    exchange_once()
    print("| kernel | least (MB) | requested (MB) | memory (MB) | memory / least |")
    print("|---|---|---|---|---|")
    worst = 0.0
    for case in cases():
        requested, memory = measured(case)
        ratio = memory / case.least
        worst = max(worst, ratio)
        figures = " | ".join(f"{b / 1e6:.3f}" for b in (case.least, requested, memory))
        print(f"| {case.name} | {figures} | {ratio:.2f} |", flush=True)
    sys.exit(1 if worst > LIMIT else 0)


if __name__ == "__main__":
    main()
