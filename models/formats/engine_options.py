"""How engines are told of a head and of its draft shape: the words that a launch config beside an
export and a snippet on a card share (spec/engines.md, spec/eagle.md 5).
"""

from dataclasses import dataclass
from typing import Any

# What is written where nothing was measured.
DEFAULT_DEPTH = 3
DEFAULT_DRAFT = f"chain:{DEFAULT_DEPTH}"


@dataclass(frozen=True, slots=True)
class Shape:
    """How deep a draft goes, how wide its levels are, and how many drafts it has."""

    depth: int
    topk: int
    nodes: int

    @classmethod
    def chain(cls, depth: int) -> "Shape":
        return cls(depth, 1, depth)

    @property
    def is_chain(self) -> bool:
        return self.topk == 1


def parse_numbers(draft: str) -> Shape | None:
    """`chain:DEPTH` or `tree:NODES,TOPK,DEPTH`; None for what has no shape without more to read."""
    kind, _, rest = draft.partition(":")
    numbers = rest.split(",")
    if not all(number.isdecimal() for number in numbers):
        return None
    sizes = [int(number) for number in numbers]
    if kind == "chain" and len(sizes) == 1:
        return Shape.chain(sizes[0])
    if kind == "tree" and len(sizes) == 3:
        nodes, topk, depth = sizes
        return Shape(depth, topk, nodes)
    return None


def vllm_config(method: str, model: str, depth: int, revision: str | None = None) -> dict[str, Any]:
    """vLLM's `--speculative-config`. `method` is eagle3 or medusa; vLLM drafts chains."""
    return {
        "method": method,
        "model": model,
        **({"revision": revision} if revision else {}),
        "num_speculative_tokens": depth,
        "draft_tensor_parallel_size": 1,
    }


def sglang_options(head: str, shape: Shape) -> list[str]:
    """SGLang's flags of an EAGLE-3 head; it counts the root among the draft tokens."""
    return [
        "--speculative-algorithm EAGLE3",
        f"--speculative-draft-model-path {head}",
        f"--speculative-num-steps {shape.depth}",
        f"--speculative-eagle-topk {shape.topk}",
        f"--speculative-num-draft-tokens {shape.nodes + 1}",
    ]
