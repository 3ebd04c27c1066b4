"""A target as doctor sees it: its config and tokenizer, and of its weights at most two matrices."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headsmith.errors import HeadsmithError
from headsmith.models import identity, loading
from headsmith.models.identity import Identity
from headsmith.models.strict import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a head is compared with. `config` is the text model's; `bases` are the models that it
    says it was made from; `output` reads its output matrix [V, H], or gives None where that is not
    at hand.
    """

    identity: Identity
    config: PretrainedConfig
    quantization: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    bases: tuple[str, ...]
    stop_ids: tuple[int, ...]
    output: Callable[[], Tensor | None]

    @property
    def path(self) -> str:
        return self.identity.path

    @property
    def max_context(self) -> int:
        return int(getattr(self.config, "max_position_embeddings", 0) or 2**30)

    @classmethod
    def read(cls, path: str, revision: str | None = None) -> TargetFacts:
        """The facts of a folder, GGUF file, embedded name or Hub id, without loading its weights.

        Raises HeadsmithError when there is no config or tokenizer that could be read.
        """
        place, extra = loading.locate(path)
        tokenizer = loading.load_tokenizer(path, revision)
        try:
            whole = AutoConfig.from_pretrained(place, revision=revision, **extra)
        except Exception as fault:  # transformers raises nearly anything here
            reason = " ".join(str(fault).split())[:200].rstrip(".")
            raise HeadsmithError(
                f"the config of target {path} could not be read ({reason}); give the folder of a "
                "causal language model"
            ) from fault
        config = whole.get_text_config()
        matrices = None if extra else _Matrices(Path(place), whole)
        found = matrices.both() if matrices is not None else None
        who = Identity(
            path=path,
            revision=revision,
            fingerprint=identity.fingerprint(config, tokenizer, found) if found else None,
            tokenizer=identity.tokenizer_sha256(tokenizer),
            chat_template=identity.template_sha256(tokenizer),
            sketch=identity.sketch(*found) if found else None,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
        )
        return cls(
            identity=who,
            config=config,
            quantization=_quantization(whole),
            tokenizer=tokenizer,
            bases=_bases(Path(place) / "README.md"),
            stop_ids=_stop_ids(Path(place), config, tokenizer),
            output=lambda: found[1] if found else None,
        )


class _Matrices:
    """Embedding and output head of a model in a folder of safetensors, by the names that its class
    gives them.
    """

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        self.folder, self.config = folder, config

    def both(self) -> tuple[Tensor, Tensor] | None:
        """[V, H] each; None where they are not stored here under those names."""
        files = self._files()
        if not files:
            return None
        try:
            embedding, output = self._names()
        except Exception:  # an architecture that transformers does not know fails in its own way
            return None
        tied = self.config.get_text_config().tie_word_embeddings
        wanted = (embedding, embedding if tied else output)
        if not all(name in files for name in wanted):
            return None
        try:
            first, second = (self._read(files[name], name) for name in wanted)
        except (SafetensorError, OSError):
            return None
        return first, second

    def _files(self) -> dict[str, Path]:
        """The file of each tensor; {} for other formats, and for files that cannot be read."""
        index, single = (
            self.folder / name for name in ("model.safetensors.index.json", "model.safetensors")
        )
        try:
            if single.is_file():
                with safe_open(single, framework="pt") as handle:
                    return dict.fromkeys(handle.keys(), single)
            if index.is_file():
                named = read_json(index)["weight_map"]
                return {name: self.folder / file for name, file in named.items()}
        except (SafetensorError, OSError, KeyError, HeadsmithError):
            pass
        return {}

    def _names(self) -> tuple[str, str]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        parts = (model.get_input_embeddings(), model.get_output_embeddings())
        embedding, output = (names.get(id(getattr(part, "weight", None)), "") for part in parts)
        return embedding, output

    @staticmethod
    def _read(file: Path, name: str) -> Tensor:
        with safe_open(file, framework="pt") as handle:
            return handle.get_tensor(name)


def _quantization(config: PretrainedConfig) -> dict[str, Any]:
    said = getattr(config, "quantization_config", None) or {}
    return said if isinstance(said, dict) else dict(said.to_dict())


def _bases(card: Path) -> tuple[str, ...]:
    """`base_model` of a model card; a card that cannot be read names none."""
    try:
        text = card.read_text(encoding="utf-8")
        front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        found = (yaml.safe_load(front[1]) or {}).get("base_model") if front else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):
        return ()
    names = found if isinstance(found, list) else [found]
    return tuple(name for name in names if isinstance(name, str))


def _stop_ids(
    folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Ids that end an answer, as `generate` reads them."""
    generation = folder / "generation_config.json"
    said = read_json(generation) if generation.is_file() else {}
    places = (said.get("eos_token_id"), getattr(config, "eos_token_id", None))
    found: Any = next((ids for ids in places if ids is not None), tokenizer.eos_token_id)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    return tuple(sorted({int(i) for i in ids} | loading.end_of_turn_ids(tokenizer)))
