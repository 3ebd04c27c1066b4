"""How engines are started with a head: snippets for its card (spec/engines.md, spec/eagle.md 5)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headsmith.models.medusa_files import MODEL_TYPE

DEFAULT_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Snippet:
    """What to type to serve with an engine, or why it cannot be."""

    engine: str
    language: str
    text: str
    remark: str


@dataclass(frozen=True, slots=True)
class Shape:
    """What is drafted a pass: depth, children of a node, drafts in all; a chain has one child."""

    depth: int
    top: int = 1
    drafts: int | None = None

    @classmethod
    def parse(cls, draft: str | None, most: int | None) -> Shape:
        """Of `chain:DEPTH` or `tree:NODES,TOPK,DEPTH`; of anything else the default depth. `most`
        is how deep the head can draft.
        """
        kind, _, numbers = (draft or "").partition(":")
        try:
            sizes = [int(number) for number in numbers.split(",")]
        except ValueError:
            sizes = []
        if kind == "tree" and len(sizes) == 3:
            return cls(sizes[2], sizes[1], sizes[0])
        depth = sizes[0] if kind == "chain" and sizes else most or DEFAULT_DEPTH
        return cls(depth if most is None else min(depth, most))


def snippets(
    config: dict[str, Any], repo: str, revision: str | None, target: str, draft: str | None
) -> list[Snippet]:
    """For the head of `config` in the repository `repo`, drafting as it was measured, `draft`."""
    medusa = config.get("model_type") == MODEL_TYPE
    shape = Shape.parse(draft, int(config["num_heads"]) if medusa else None)
    return [
        _vllm(config, shape, repo, revision, target),
        _sglang(config, shape, repo, target),
        _headsmith(repo, revision, target, draft or f"chain:{shape.depth}"),
    ]


def _vllm(
    config: dict[str, Any], shape: Shape, repo: str, revision: str | None, target: str
) -> Snippet:
    medusa = config.get("model_type") == MODEL_TYPE
    speculative: dict[str, Any] = {
        "method": "medusa" if medusa else "eagle3",
        "model": repo,
        **({"revision": revision} if revision else {}),
        "num_speculative_tokens": shape.depth,
        "draft_tensor_parallel_size": 1,
    }
    text = f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'"
    remark = "Give the method: without it vLLM guesses from the name."
    if config.get("fc_norm") or config.get("norm_output"):
        remark += " EAGLE-3.1 takes vLLM 0.22.1 or newer; older ones pass over its norms."
    if shape.top > 1:
        remark += " It drafts a chain, whatever tree was measured."
    return Snippet("vLLM", "bash", text, remark)


def _sglang(config: dict[str, Any], shape: Shape, repo: str, target: str) -> Snippet:
    why = None
    if config.get("model_type") == MODEL_TYPE:
        why = "SGLang does not know Medusa heads."
    elif "speculators_model_type" in config or "speculators_config" in config:
        why = "SGLang does not read the speculators layout; export the head in the native one."
    elif config.get("norm_before_residual"):
        why = "SGLang does not know norm_before_residual, with which this head was trained."
    if why is not None:
        return Snippet("SGLang", "", "", why)
    text = (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"    --speculative-algorithm EAGLE3 --speculative-draft-model-path {repo} \\\n"
        f"    --speculative-num-steps {shape.depth} --speculative-eagle-topk {shape.top} \\\n"
        f"    --speculative-num-draft-tokens {(shape.drafts or shape.depth) + 1}"
    )
    remark = "The algorithm is EAGLE3: with EAGLE the head is served wrong without an error."
    return Snippet("SGLang", "bash", text, remark)


def _headsmith(repo: str, revision: str | None, target: str, draft: str) -> Snippet:
    head = f"{repo}@{revision}" if revision else repo
    text = f"headsmith eval --target {target} --head {head} --draft {draft}"
    return Snippet("headsmith", "bash", text, "Measures the head on your hardware.")
