"""Finding and loading a target: local folders, GGUF files, the embedded default, Hub ids; and its
tokenizer's identity.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from headsmith.errors import HeadsmithError
from headsmith.models import embedded

# What transformers raises for a folder that holds no model it can read.
_FAULTS = (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError)
# Keys of a config that count the blocks or say something of each.
_PER_BLOCK = ("num_hidden_layers", "layer_types", "mlp_layer_types")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "spiece*")
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
            raise HeadsmithError(
                f"{path} holds no config.json: it is not a model's folder; check the path"
            )
        if (place / "config.json").is_file():
            _check_config(place / "config.json")
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
    tokenizer = load_tokenizer(path, revision)
    return _load_weights(path, place, dtype, arguments), tokenizer


def load_ends(
    path: str, revision: str | None, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """The model without its blocks, whose weights are not read; None where its architecture or its
    file does not allow that. Its config still counts the blocks.
    """
    place, extra = locate(path)
    if extra:
        return None
    transformers_logging.disable_progress_bar()
    tokenizer = load_tokenizer(path, revision)
    said = transformers_logging.get_verbosity()
    # It would list the weights of all blocks as unexpected.
    transformers_logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(place, revision=revision)
        text = config.get_text_config()
        whole = {key: getattr(text, key) for key in _PER_BLOCK if getattr(text, key, None)}
        for key, value in whole.items():
            setattr(text, key, 0 if isinstance(value, int) else [])
        model = _load_weights(path, place, dtype, {"revision": revision, "config": config})
    except (HeadsmithError, *_FAULTS):
        return None
    finally:
        transformers_logging.set_verbosity(said)
    text = model.config.get_text_config()
    for key, value in whole.items():
        setattr(text, key, value)
    return model, tokenizer


def _load_weights(
    path: str, place: str, dtype: torch.dtype, arguments: dict[str, Any]
) -> PreTrainedModel:
    try:
        # transformers only logs the tensors that a checkpoint lacks; a target with a random matrix
        # is no target.
        model, report = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, output_loading_info=True, **arguments
        )
    except SafetensorError as error:
        raise HeadsmithError(
            f"the weights of target {path} could not be loaded ({_reason(error)}); they are cut "
            "off or damaged, so get them again"
        ) from error
    except _FAULTS as error:
        raise HeadsmithError(
            f"target {path} could not be loaded as a causal language model: {_reason(error)}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise HeadsmithError(
            f"target {path} lacks {len(missing)} tensors, the first {missing[0]}: "
            "cut off or another model"
        )
    return model


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The target's tokenizer alone; the folder need not hold the model."""
    place, extra = locate(path, weights=False)
    try:
        return AutoTokenizer.from_pretrained(place, revision=revision, **extra)
    except Exception as error:  # the tokenizers library raises bare exceptions
        if extra:
            what = f"{path} could not be loaded as GGUF ({_reason(error)}); give a GGUF of a model"
        elif not Path(place).is_dir():
            what = f"target {path} is no folder here, and as a Hub id it could not be loaded"
            what += f" ({_reason(error)}); check the path"
        elif not any(any(Path(place).glob(pattern)) for pattern in _TOKENIZER_FILES):
            what = f"{path} holds no tokenizer, no tokenizer.json for one; give a model's folder"
        else:
            what = f"the tokenizer of {path} could not be loaded ({_reason(error)}); its files are"
            what += " cut off or of another kind, so get them again"
        raise HeadsmithError(what) from error


def is_bare(path: str) -> bool:
    """Whether `path` is a folder that describes a model and holds nothing to make tokens with."""
    folder = Path(path).expanduser()
    described = (folder / "config.json").is_file()
    return described and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)


def _check_config(path: Path) -> None:
    """Say which file is damaged, which transformers does not always."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HeadsmithError(
            f"{path} could not be loaded ({error}); it may be cut off, so get it again"
        ) from error
    if not isinstance(config, dict):
        raise HeadsmithError(
            f"{path} could not be loaded: it holds no JSON object, so it is no model's config"
        )


def _reason(error: Exception) -> str:
    """What a library says, short enough for a sentence of ours."""
    said = " ".join(str(error).split())
    return (said if len(said) <= 300 else f"{said[:297]}...").rstrip(".") or type(error).__name__


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


def find_blocks(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The list of the target's blocks, wherever the architecture keeps it."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and module is not decoder:
            return module
    raise HeadsmithError(
        f"{type(decoder).__name__} keeps its {count} blocks in no list; it cannot be tapped"
    )
