"""Checks of a head against its target's config and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headsmith.models.doctor.checkpoint import Checkpoint
from headsmith.models.doctor.findings import Finding, error, note, warning
from headsmith.models.doctor.target import TargetFacts
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.eagle3_shape import body_rope
from headsmith.models.provenance import ITS_OWN, differences, width_difference

_MATTERS = 1e-6


def check_width(head: Checkpoint, target: TargetFacts) -> Iterator[Finding]:
    """Whether the target's states fit the head."""
    other = width_difference(target.identity, head.folder)
    if other is not None:
        yield error("width", f"{other}, so give its own target")


def check_identity(head: Checkpoint, target: TargetFacts) -> Iterator[Finding]:
    """Tokenizer, chat template, vocabulary, revision and weights: is it the head's own target?"""
    own = (head.about.get("target") or {}).get("path")
    for difference in differences(target.identity, head.folder, own in target.bases):
        yield error("identity", f"{difference}; {ITS_OWN}")
    if head.about and target.identity.fingerprint is None:
        yield note(
            "identity",
            f"the matrices of target {target.path} are not at hand, so its weights were not "
            "compared with the fingerprint in headsmith.json; give its folder for that",
        )


def check_body(head: Checkpoint, target: TargetFacts) -> Iterator[Finding]:
    """RoPE, eps and context of an EAGLE-3 head against the target's."""
    if not isinstance(head.head, Eagle3Head):
        return
    where, config = f"head {head.folder}", head.head.config
    rope = {"rope_type": "default", **config.rope}
    theirs = body_rope(target.config)
    if not _same_rope(rope, theirs):
        # headsmith trains with the target's RoPE; what others trained with only they know.
        say = error if head.about else warning
        yield say(
            "rope",
            f"{where} rotates by {_told(rope)} and its target by {_told(theirs)}; config.json must "
            "say what the head was trained with, so correct it unless that was so",
        )
    eps = getattr(target.config, "rms_norm_eps", None)
    if eps is not None and abs(config.rms_norm_eps - eps) > max(_MATTERS, 0.01 * eps):
        yield warning(
            "eps",
            f"{where} has rms_norm_eps {config.rms_norm_eps:g} and its target {eps:g}; correct "
            "config.json unless it was trained so",
        )
    if config.max_position_embeddings < target.max_context < 2**30:
        yield warning(
            "context",
            f"{where} says it holds {config.max_position_embeddings} positions and its target "
            f"{target.max_context}; SGLang refuses it and past that length acceptance collapses, "
            "so train it on longer text or serve shorter requests",
        )


def check_ends(head: Checkpoint, target: TargetFacts) -> Iterator[Finding]:
    """Whether the head can draft what ends an answer."""
    if head.draft_ids is None:
        return
    drafted = set(head.draft_ids.tolist())
    lost = [i for i in target.stop_ids if i not in drafted and i < target.identity.vocab_size]
    if lost:
        names = target.tokenizer.convert_ids_to_tokens(lost)
        yield warning(
            "ends",
            f"head {head.folder} cannot draft {', '.join(map(str, names))}, which ends answers of "
            "its target; train it with a draft vocabulary that holds it",
        )


def check_shared(head: Checkpoint, target: TargetFacts) -> Iterator[Finding]:
    """Whether the lm_head that Medusa heads share is the target's."""
    if head.shared is None:
        return
    output = target.output()
    if output is not None and not _equal(head.shared, output):
        yield error(
            "lm_head",
            f"head {head.folder}: its lm_head.weight is not that of the target {target.path}; "
            f"{ITS_OWN}",
        )


def check_serving(head: Checkpoint, target: TargetFacts) -> Iterator[Finding]:
    """What to mind when both are served: FP8 and the length of the training text."""
    said = target.quantization
    if "fp8" in str(said).lower() or "float8" in str(said).lower():
        yield note(
            "fp8",
            f"the target {target.path} is stored in FP8; keep the cache of head {head.folder} in "
            "the head's own dtype (no FP8 scales of the target's), or acceptance drops silently",
        )
    recipe = head.about.get("recipe") or {}
    trained = (recipe.get("data") or {}).get("max_length")
    if isinstance(trained, int) and trained < target.max_context < 2**30:
        yield note(
            "context",
            f"head {head.folder} was trained on texts of up to {trained} tokens and its target "
            f"takes {target.max_context}; measure longer ones with headsmith eval --context",
        )


def _same_rope(some: dict[str, Any], others: dict[str, Any]) -> bool:
    keys = (some.keys() | others.keys()) - {"partial_rotary_factor"}
    return all(_close(some.get(key), others.get(key)) for key in keys)


def _close(some: Any, other: Any) -> bool:
    if isinstance(some, (int, float)) and isinstance(other, (int, float)):
        return abs(some - other) <= _MATTERS * max(abs(some), abs(other))
    return bool(some == other)


def _told(rope: dict[str, Any]) -> str:
    rest = [f"{key} {value}" for key, value in sorted(rope.items()) if key != "rope_theta"]
    return f"theta {rope.get('rope_theta'):g} ({', '.join(rest)})"


def _equal(stored: Tensor, own: Tensor) -> bool:
    """Equal but for the dtype that either is kept in."""
    if stored.shape != own.shape:
        return False
    least = min(stored.dtype, own.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(stored.to(least), own.to(least))
