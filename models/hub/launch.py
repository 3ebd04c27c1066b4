"""How engines are started with a head: snippets for its card (spec/engines.md, spec/eagle.md 5)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headsmith.models.formats.engine_options import (
    DEFAULT_DEPTH,
    Shape,
    parse_numbers,
    sglang_options,
    vllm_config,
)
from headsmith.models.medusa_files import MODEL_TYPE


@dataclass(frozen=True, slots=True)
class Snippet:
    """What to type to serve with an engine, or why it cannot be."""

    engine: str
    language: str
    text: str
    remark: str


def shape_of(draft: str | None, most: int | None) -> Shape:
    """Of `chain:DEPTH` or `tree:NODES,TOPK,DEPTH`; of anything else a chain of the default depth.
    `most` is how deep the head can draft.
    """
    shape = parse_numbers(draft or "") or Shape.chain(most or DEFAULT_DEPTH)
    return Shape.chain(min(shape.depth, most)) if shape.is_chain and most else shape


def snippets(
    config: dict[str, Any], repo: str, revision: str | None, target: str, draft: str | None
) -> list[Snippet]:
    """For the head of `config` in the repository `repo`, drafting as it was measured, `draft`."""
    medusa = config.get("model_type") == MODEL_TYPE
    shape = shape_of(draft, int(config["num_heads"]) if medusa else None)
    return [
        _vllm(config, shape, repo, revision, target),
        _sglang(config, shape, repo, target),
        _headsmith(repo, revision, target, draft or f"chain:{shape.depth}"),
    ]


def _vllm(
    config: dict[str, Any], shape: Shape, repo: str, revision: str | None, target: str
) -> Snippet:
    medusa = config.get("model_type") == MODEL_TYPE
    speculative = vllm_config("medusa" if medusa else "eagle3", repo, shape.depth, revision)
    text = f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'"
    remark = "Give the method: without it vLLM guesses from the name."
    if config.get("fc_norm") or config.get("norm_output"):
        remark += " EAGLE-3.1 takes vLLM 0.22.1 or newer; older ones pass over its norms."
    if not shape.is_chain:
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
    words = [f"python -m sglang.launch_server --model-path {target}", *sglang_options(repo, shape)]
    text = " \\\n    ".join(words)
    remark = "The algorithm is EAGLE3: with EAGLE the head is served wrong without an error."
    return Snippet("SGLang", "bash", text, remark)


def _headsmith(repo: str, revision: str | None, target: str, draft: str) -> Snippet:
    head = f"{repo}@{revision}" if revision else repo
    text = f"headsmith eval --target {target} --head {head} --draft {draft}"
    return Snippet("headsmith", "bash", text, "Measures the head on your hardware.")
