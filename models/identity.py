"""Who a target is, from its config, its tokenizer and two of its matrices: enough to tell whether a
head is for it, and small enough to be read from a folder without loading the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headsmith.models.loading import tokenizer_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from headsmith.models.target import Target

# Keys of a config that say how it was stored, not what the model computes.
_STORAGE_KEYS = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "quantization_config",
}
# Entries of each matrix in a sketch, and the digits that are kept of them.
_SKETCHED, _DIGITS = 32, 4
# Post-training moves embeddings little; those of models trained apart have nothing in common.
_RELATED = 0.9


@dataclass(frozen=True, slots=True)
class Identity:
    """What headsmith.json records of a target. `fingerprint` and `sketch` are None where its two
    matrices are not at hand.
    """

    path: str
    revision: str | None
    fingerprint: str | None
    tokenizer: str
    chat_template: str | None
    sketch: list[float] | None
    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, target: Target) -> Identity:
        """The identity of a target that is loaded."""
        embedding = target.model.get_input_embeddings().weight
        return cls(
            path=target.path,
            revision=target.revision,
            fingerprint=target.fingerprint(),
            tokenizer=tokenizer_sha256(target.tokenizer),
            chat_template=template_sha256(target.tokenizer),
            sketch=sketch(embedding, target.head_weight),
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_layers=target.num_layers,
        )


def fingerprint(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, matrices: Sequence[Tensor]
) -> str:
    """sha256 over config, tokenizer, chat template, and the `matrices`: embedding and output head,
    both [V, H].
    """
    digest = hashlib.sha256()
    described = {k: v for k, v in config.to_dict().items() if k not in _STORAGE_KEYS}
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    digest.update(tokenizer_bytes(tokenizer))
    for tensor in matrices:
        # bfloat16, so that the dtype it is loaded in does not change who it is.
        stored = tensor.detach().to(torch.bfloat16).view(torch.int16).cpu()
        digest.update(stored.numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over the tokenizer and its chat template alone, to tell a mismatch's cause."""
    return f"sha256:{hashlib.sha256(tokenizer_bytes(tokenizer)).hexdigest()}"


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """sha256 over the chat template alone; None without one."""
    template: Any = tokenizer.chat_template
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def sketch(embedding: Tensor, output: Tensor) -> list[float]:
    """A few entries of both matrices [V, H], spread over rows and columns."""
    found = []
    for matrix in (embedding.detach(), output.detach()):
        rows = torch.linspace(0, matrix.shape[0] - 1, _SKETCHED).long()
        columns = torch.arange(_SKETCHED) * 97 % matrix.shape[1]
        found += matrix[rows.to(matrix.device), columns.to(matrix.device)].float().tolist()
    return [float(f"{value:.{_DIGITS}g}") for value in found]


def related(some: Sequence[float] | None, others: Sequence[float] | None) -> bool:
    """Whether two sketches are of models of which one was post-trained from the other; of equal
    ones only the tokenizer or the config was changed.
    """
    if not some or not others or len(some) != len(others) or list(some) == list(others):
        return False
    both = torch.tensor([list(some), list(others)], dtype=torch.float64)
    agreement = float(torch.corrcoef(both)[0, 1])
    return agreement >= _RELATED
