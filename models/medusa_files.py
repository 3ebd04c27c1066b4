"""Medusa heads on disk, in the layout that vLLM reads (spec/medusa.md 1.3, 1.4), and the draft tree
that was calibrated for them.

    config.json          model_type medusa, and no key of the target's that vLLM would take for ours
    model.safetensors    blocks.{i}.layers.{j}.weight/.bias, lm_heads.{i}.weight or lm_head.weight,
                         token_map
    medusa_tree.json     medusa_choices and the accuracies that they were chosen by
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.files import write_atomic, write_json
from headsmith.models.strict import check_finite, check_shape, read_json, read_tensors

LmHead = Literal["shared", "private", "truncated"]
MODEL_TYPE = "medusa"
TREE_FILE = "medusa_tree.json"
TREE_SCHEMA = "headsmith.medusa_tree/1"


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Sizes of Medusa heads; widths and `vocab_size` are the target's.

    lm_head `shared`: the target's own. `private`: one for each head. `truncated`: one for all
    heads, over the `draft_vocab_size` ids of a draft vocabulary.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int = 5
    num_layers: int = 1
    lm_head: LmHead = "shared"

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_layers) < 1:
            raise HeadsmithError(
                f"{self.num_heads} Medusa heads of {self.num_layers} layers draft nothing; both "
                "numbers must be at least 1"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise HeadsmithError(
                f"draft vocabulary of {self.draft_vocab_size} ids does not fit "
                f"the target's {self.vocab_size}"
            )
        if (self.lm_head == "truncated") != (self.draft_vocab_size < self.vocab_size):
            raise HeadsmithError(
                f"a Medusa lm_head that is {self.lm_head} cannot draft {self.draft_vocab_size} of "
                f"{self.vocab_size} ids; a truncated one drafts fewer than all, the others all"
            )

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "MedusaConfig":
        """Read the config.json of a vLLM Medusa head."""
        if not raw.get("medusa_fc_bias", False):
            raise HeadsmithError(
                "its config.json does not say medusa_fc_bias: true; blocks without a bias are not "
                "supported"
            )
        try:
            vocab = raw["vocab_size"]
            drafted = raw.get("truncated_vocab_size") or vocab
            one = bool(raw.get("original_lm_head", False))
            sizes = {
                "hidden_size": raw["hidden_size"],
                "num_heads": raw["num_heads"],
                "num_layers": raw["num_hidden_layers"],
            }
        except KeyError as error:
            raise HeadsmithError(
                f"its config.json has no {error.args[0]}: not a Medusa head that vLLM could load"
            ) from error
        if drafted < vocab and not one:
            raise HeadsmithError(
                "it has private lm_heads over a truncated vocabulary, which is not supported; only "
                "one lm_head for all heads is (original_lm_head: true)"
            )
        kind: LmHead = "truncated" if drafted < vocab else "shared" if one else "private"
        return cls(vocab_size=vocab, draft_vocab_size=drafted, lm_head=kind, **sizes)

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The config.json that vLLM reads. It renames every key with "num" and "heads" or "layers"
        in it, so there must be one of each.
        """
        return {
            "architectures": ["MedusaModel"],
            "model_type": MODEL_TYPE,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "truncated_vocab_size": self.draft_vocab_size,
            "original_lm_head": self.lm_head != "private",
            "medusa_fc_bias": True,
            "torch_dtype": dtype,
        }


@dataclass(frozen=True, slots=True)
class Calibration:
    """The draft tree of Medusa heads and what it was chosen by.

    choices: rank paths (spec/medusa.md 3.1). accuracy[i][r]: how often rank r of head i is right
    when the drafts before it were. about: what was measured, for people.
    """

    choices: list[list[int]]
    accuracy: list[list[float]]
    about: dict[str, Any]


def read_checkpoint(path: Path) -> tuple[MedusaConfig, dict[str, Tensor], Tensor, Tensor | None]:
    """Config, tensors of the module, draft_ids int64 [V_d], and the stored copy [V, H] of a shared
    lm_head.
    """
    raw = read_json(path / "config.json")
    try:
        config = MedusaConfig.from_json(raw)
    except HeadsmithError as error:
        raise HeadsmithError(f"head {path}: {error}") from error
    tensors = read_tensors(path)
    draft_ids = _draft_ids(path, config, tensors.pop("token_map", None))
    if config.lm_head != "shared":
        return config, tensors, draft_ids, None
    shared = tensors.pop("lm_head.weight", None)
    if shared is None:
        raise HeadsmithError(
            f"head {path} lacks lm_head.weight, the copy of the target's that vLLM drafts with"
        )
    check_shape(path, "lm_head.weight", shared, (config.vocab_size, config.hidden_size))
    check_finite(path, "lm_head.weight", shared)
    return config, tensors, draft_ids, shared


def _draft_ids(path: Path, config: MedusaConfig, token_map: Tensor | None) -> Tensor:
    """Target ids of the rows of the lm_head, checked."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    if config.lm_head != "truncated":
        if token_map is not None:
            raise HeadsmithError(
                f"head {path} has a token_map and drafts all {vocab} ids; its config.json and its "
                "tensors come from different heads"
            )
        return torch.arange(vocab)
    if token_map is None:
        raise HeadsmithError(
            f"head {path} drafts {size} of {vocab} ids but has no token_map; its ids mean nothing"
        )
    if token_map.shape != (size,):
        raise HeadsmithError(
            f"head {path}: token_map has {token_map.numel()} entries for a vocabulary of {size}"
        )
    ids = token_map.long()
    if ids.min() < 0 or ids.max() >= vocab or ids.unique().numel() != size:
        raise HeadsmithError(
            f"head {path}: token_map names ids outside the target's {vocab} or one of them twice"
        )
    return ids


def write_checkpoint(
    path: Path,
    config: MedusaConfig,
    tensors: dict[str, Tensor],
    draft_ids: Tensor,
    shared: Tensor | None,
    dtype: torch.dtype | None,
) -> None:
    """Write weights and config, each file atomically, the config last. vLLM does not borrow the
    target's lm_head, so a shared one is stored too, in its own dtype unless `dtype` is given.
    """
    kept = dtype or next(iter(tensors.values())).dtype
    out = {name: t.detach().to("cpu", kept).contiguous() for name, t in tensors.items()}
    if config.lm_head == "shared":
        assert shared is not None, "a head of no target cannot be saved"
        # A clone: safetensors refuses storage that is shared with a tied embedding.
        out["lm_head.weight"] = shared.detach().to("cpu", dtype or shared.dtype).clone()
    if config.lm_head == "truncated":
        out["token_map"] = draft_ids.cpu()
    path.mkdir(parents=True, exist_ok=True)
    write_atomic(
        path / "model.safetensors", lambda temporary: save_file(out, temporary, {"format": "pt"})
    )
    write_json(path / "config.json", config.to_json(str(kept).removeprefix("torch.")))


def read_calibration(path: Path) -> Calibration | None:
    """The tree stored beside the head in `path`; None if there is none."""
    file = path / TREE_FILE
    if not file.is_file():
        return None
    raw = read_json(file)
    choices: Any = raw.get("medusa_choices")
    accuracy: Any = raw.get("accuracy")
    if not (_lists_of(choices, int) and _lists_of(accuracy, float)):
        raise HeadsmithError(
            f"{file} holds no medusa_choices and accuracy; write it with headsmith calibrate"
        )
    return Calibration(choices, accuracy, raw.get("about") or {})


def write_calibration(path: Path, calibration: Calibration) -> Path:
    """Store the tree beside the head in `path`, atomically; returns the file."""
    file = path / TREE_FILE
    write_json(
        file,
        {
            "schema": TREE_SCHEMA,
            "medusa_choices": calibration.choices,
            "accuracy": calibration.accuracy,
            "about": calibration.about,
        },
    )
    return file


def _lists_of(value: Any, kind: type) -> bool:
    """Whether a value of a JSON file is a list of lists of numbers, not empty."""
    kinds = (int, float) if kind is float else (int,)
    return bool(value) and all(
        isinstance(row, list)
        and row
        and all(isinstance(x, kinds) and not isinstance(x, bool) and x >= 0 for x in row)
        for row in value
    )
