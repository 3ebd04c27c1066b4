"""The least that each stage of a round must do: bytes that it cannot avoid and operations.

Weights are streamed once a call whatever the rows, keys and values once a request. What is written
in between is left out: a roofline is a bound, not a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.linear import parameters_below
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and operations of one call."""

    bytes: float
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What a round looks like: rows of the target's pass, drafted rows of a step, nodes accepted,
    requests, tokens in the cache of one, bytes of a token in the target's and in the head's.
    """

    rows: float
    drafted: float
    accepted: float
    batch: int
    context: float
    token_bytes: float
    head_token_bytes: float


def work_of(stage: str, target: Target, head: object, at: Setting) -> Work | None:
    """The least work of a call of `stage` (inference/stages.py); None where there is no bound that
    tells anything.
    """
    item, width = target.dtype.itemsize, target.vocab_size
    if stage == "target pass":
        weights = block_parameters(target, at.rows)
        cached = at.batch * at.context * at.token_bytes
        return Work(weights.touched * item + cached, 2 * weights.active * at.rows)
    if stage == "target lm_head":
        size = target.head_weight.numel()
        return Work(size * item, 2 * size * at.rows)
    if stage == "verify":
        # Logits are float32, and each is looked at.
        return Work(at.rows * width * 4)
    if stage == "compaction":
        return Work(2 * at.batch * at.accepted * at.token_bytes)
    if isinstance(head, MedusaHead) and stage == "draft heads":
        own = [parameters_below(module) for module in (head.blocks, *head.own_lm_heads())]
        shared = target.head_weight.numel() if head.config.lm_head == "shared" else 0
        size = sum(own) + shared
        return Work(size * item, 2 * size * at.batch)
    return _of_eagle(stage, head, at, item) if isinstance(head, Eagle3Head) else None


def _of_eagle(stage: str, head: Eagle3Head, at: Setting, item: int) -> Work | None:
    layer, cached = parameters_below(head.midlayer), at.batch * at.context * at.head_token_bytes
    if stage == "draft input":
        # The taps of what was committed pass fc; of each request one row passes the whole layer.
        fc, rows = parameters_below(head.fc), at.batch * (at.accepted + 1)
        return Work((fc + layer) * item + cached, 2 * fc * rows + 2 * layer * at.batch)
    if stage == "draft layer":
        return Work(layer * item + cached, 2 * layer * at.drafted)
    if stage == "draft lm_head":
        size = parameters_below(head.lm_head)
        return Work(size * item, 2 * size * at.drafted)
    return None


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of the blocks that a pass reads, and those that one row goes through."""

    touched: float
    active: float


def block_parameters(target: Target, rows: float) -> Weights:
    """Of the target's blocks and last norm. Of E experts a row takes k, so `rows` of them are
    expected to read 1 - (1 - k / E) ** rows of all.
    """
    decoder, config = target.decoder, target.config
    embedding = target.model.get_input_embeddings().weight.numel()
    total = parameters_below(decoder) - embedding
    count = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    each = _first(config, "num_experts_per_tok", "num_experts_per_token")
    if not count or not each:
        return Weights(total, total)
    experts = sum(parameters_below(module) for module in _experts(decoder))
    share = each / count
    rest = total - experts
    return Weights(rest + experts * (1 - (1 - share) ** rows), rest + experts * share)


def _experts(decoder: nn.Module) -> list[nn.Module]:
    """The modules that hold all experts of a block."""
    return [module for name, module in decoder.named_modules() if name.endswith(".experts")]


def _first(config: Any, *names: str) -> int | None:
    return next((v for n in names if (v := getattr(config, n, None)) is not None), None)
