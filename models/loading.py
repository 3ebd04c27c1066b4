"""Finding and loading a target: local folders, GGUF files, the embedded default, Hub ids; and its
tokenizer's identity.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from headsmith.errors import HeadsmithError
from headsmith.models import embedded

# What transformers raises for a folder that holds no model it can read, cut-off files included.
_FAULTS = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    ImportError,
    TypeError,
    SafetensorError,
)
_CONTENT = "\ue000answer\ue001"


def locate(path: str, weights: bool = True) -> tuple[str, dict[str, str]]:
    """Where a target is: (folder or Hub id, further arguments of from_pretrained).

    Raises HeadsmithError when `path` is neither a folder with a model, a GGUF file, nor of the form
    ORG/NAME.
    """
    known = embedded.resolve(path)
    if known is not None:
        return str(known), {}
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix != ".gguf":
            raise HeadsmithError(
                f"{path} is a file but no GGUF; give a model's folder, a .gguf file or a Hub id"
            )
        return str(place.parent), {"gguf_file": place.name}
    if place.is_dir():
        if weights and not (place / "config.json").is_file():
            raise HeadsmithError(f"{path} holds no config.json: it is not a model folder")
        return str(place), {}
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        return path, {}
    raise HeadsmithError(
        f"target {path} does not exist; give a folder, a .gguf file or a Hub id (ORG/NAME)"
    )


def load_model(
    path: str, revision: str | None, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer; every failure of theirs becomes one sentence."""
    place, extra = locate(path)
    transformers_logging.disable_progress_bar()
    arguments: dict[str, Any] = {"revision": revision, **extra}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **arguments)
        # transformers only logs the tensors that a checkpoint lacks; a target with a random matrix
        # is no target.
        model, report = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, output_loading_info=True, **arguments
        )
    except _FAULTS as error:
        reason = " ".join(str(error).split())[:300]
        raise HeadsmithError(
            f"target {path} could not be loaded as a causal language model: {reason}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise HeadsmithError(
            f"target {path} lacks {len(missing)} tensors, the first {missing[0]}: "
            "cut off or another model"
        )
    return model, tokenizer


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The target's tokenizer alone; the folder need not hold the model."""
    place, extra = locate(path, weights=False)
    try:
        return AutoTokenizer.from_pretrained(place, revision=revision, **extra)
    except Exception as error:  # the tokenizers library raises bare exceptions
        reason = " ".join(str(error).split())[:300]
        raise HeadsmithError(f"{path} holds no tokenizer that could be loaded: {reason}") from error


def tokenizer_bytes(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """What a tokenizer does, as bytes: vocabulary, merges, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        described: Any = sorted(tokenizer.get_vocab().items())
    else:
        described = json.loads(backend.to_str())
        # These two only remember the last call.
        described.pop("truncation", None)
        described.pop("padding", None)
    parts = [described, tokenizer.special_tokens_map, tokenizer.chat_template]
    return json.dumps(parts, sort_keys=True, default=str).encode()


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The special token that the chat template puts directly behind an answer, if it does."""
    if not tokenizer.chat_template:
        return set()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _CONTENT}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    tail = str(text).rpartition(_CONTENT)[2]
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    first = next((i for i in ids if i in special), None)
    return set() if first is None else {int(first)}
