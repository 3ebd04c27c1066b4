"""EAGLE-3 checkpoints on disk: native (`midlayer.*`) and speculators (`layers.0.*`) layouts
(spec/eagle.md 5).
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from headsmith.errors import HeadsmithError
from headsmith.files import write_atomic, write_json
from headsmith.models.eagle3_config import Eagle3Config
from headsmith.models.strict import read_json, read_tensors

# Written by the speculators trainer for its own loss; no part of the head.
_TRAINER_ONLY = ("verifier_norm.", "verifier_lm_head.")
# Other names for tensors: the speculators layout, and SGLang's older one for a norm per tap.
_RENAMED = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def read_checkpoint(
    path: Path,
    taps: tuple[int, ...] | None,
    num_target_layers: int | None,
    config_json: dict[str, Any] | None = None,
) -> tuple[Eagle3Config, dict[str, Tensor], Tensor]:
    """Config, tensors under native names (without d2t and t2d), and draft_ids int64 [V_d].

    `config_json` stands in for the file of that name.
    """
    raw = read_json(path / "config.json") if config_json is None else config_json
    try:
        config = Eagle3Config.from_json(raw, taps, num_target_layers)
    except HeadsmithError as error:
        raise HeadsmithError(f"head {path}: {error}") from error
    tensors = {
        _native(name): tensor
        for name, tensor in read_tensors(path).items()
        if not name.startswith(_TRAINER_ONLY)
    }
    draft_ids = _draft_ids(path, config, tensors.pop("d2t", None), tensors.pop("t2d", None))
    return config, tensors, draft_ids


def _native(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _draft_ids(path: Path, config: Eagle3Config, d2t: Tensor | None, t2d: Tensor | None) -> Tensor:
    """Target ids of the draft ids, checked: d2t is an offset, t2d a mask (spec/eagle.md 1.4)."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    if d2t is None:
        if size != vocab:
            raise HeadsmithError(
                f"head {path} drafts {size} of {vocab} ids but has no d2t; its ids mean nothing"
            )
        return torch.arange(vocab)
    if d2t.shape != (size,):
        raise HeadsmithError(
            f"head {path}: d2t has {d2t.numel()} entries for a draft vocabulary of {size}"
        )
    ids = torch.arange(size) + d2t.long()
    if ids.min() < 0 or ids.max() >= vocab or ids.unique().numel() != size:
        raise HeadsmithError(
            f"head {path}: d2t maps outside the target's {vocab} ids or twice to one; "
            "it is an offset"
        )
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), ids.sort().values):
        raise HeadsmithError(
            f"head {path}: d2t and t2d name different ids; they come from different runs"
        )
    return ids


def write_checkpoint(
    path: Path,
    config: Eagle3Config,
    tensors: dict[str, Tensor],
    embedding: nn.Embedding | None,
    draft_ids: Tensor,
    dtype: torch.dtype | None,
) -> None:
    """Write the native layout, each file atomically; weights last but one, the config last."""
    dtype = dtype or tensors["fc.weight"].dtype
    out = {
        k: v.detach().to("cpu", dtype).contiguous()
        for k, v in tensors.items()
        if k != "embed_tokens.weight"
    }
    if embedding is not None:
        out["embed_tokens.weight"] = embedding.weight.detach().to("cpu", dtype).contiguous()
    if config.draft_vocab_size != config.vocab_size:
        # vLLM refuses a d2t beside the full vocabulary (spec/eagle.md 5.3).
        ids = draft_ids.cpu()
        out["d2t"] = ids - torch.arange(len(ids))
        out["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    path.mkdir(parents=True, exist_ok=True)
    write_atomic(
        path / "model.safetensors", lambda temporary: save_file(out, temporary, {"format": "pt"})
    )
    write_json(path / "config.json", config.to_json(str(dtype).removeprefix("torch.")))
