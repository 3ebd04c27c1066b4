"""Read Medusa heads in the original layouts: a lm_head for each head, or the target's for all
(spec/medusa.md 1.2-1.5).
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import MedusaConfig
from headsmith.models.strict import load_strictly
from headsmith.models.target import Target

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_NUMBERS = ("medusa_num_heads", "num_medusa_heads")


def is_original(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of the original layouts, as TGI and TensorRT-LLM read them."""
    return any(key in raw for key in _NUMBERS)


def read_original(path: Path, raw: dict[str, Any], target: Target | None) -> MedusaHead:
    """The heads in the folder `path`, in the dtype that they are stored in.

    Raises HeadsmithError if the files do not hold what the config announces, or the heads borrow
    the lm_head of a target that is not given.
    """
    tensors = _read_tensors(path)
    counts = {raw[key] for key in _NUMBERS if key in raw}
    heads = len({name.split(".")[0] for name in tensors})
    if counts != {heads}:
        raise HeadsmithError(
            f"head {path} announces {' and '.join(map(str, sorted(counts)))} Medusa heads and "
            f"holds {heads}; set medusa_num_heads in its config.json to {heads}"
        )
    # The original default; the layers themselves tell where the config is silent.
    layers = raw.get("medusa_num_layers", 1)
    own = {name for name in tensors if name.count(".") == 2 and ".linear." not in name}
    square = tensors.get("0.0.linear.weight")
    if square is None:
        raise HeadsmithError(f"head {path} lacks 0.0.linear.weight; it is no Medusa head")
    if own:
        rows = tensors[f"0.{layers}.weight"] if f"0.{layers}.weight" in tensors else None
        if rows is None:
            raise HeadsmithError(
                f"head {path} has lm_heads such as {min(own)}, not behind {layers} layers as its "
                "config.json says"
            )
        vocab = rows.shape[0]
    elif target is None:
        raise HeadsmithError(
            f"head {path} has no lm_heads and borrows its target's; give the target with --target"
        )
    else:
        vocab = target.vocab_size
    config = MedusaConfig(
        hidden_size=square.shape[0],
        vocab_size=vocab,
        draft_vocab_size=vocab,
        num_heads=heads,
        num_layers=layers,
        lm_head="private" if own else "shared",
    )
    head = MedusaHead(config, torch.arange(vocab)).to(square.dtype)
    load_strictly(head, path, {_ours(name, layers): t for name, t in tensors.items()})
    if target is not None:
        if config.hidden_size != target.hidden_size:
            raise HeadsmithError(
                f"head {path} reads states of width {config.hidden_size}, the target {target.path} "
                f"has {target.hidden_size}; it was trained for another target"
            )
        head.pair(target, path)
    return head


def _ours(name: str, layers: int) -> str:
    """`{i}.{j}.linear.X` -> `blocks.{i}.layers.{j}.X`, `{i}.{L}.weight` -> `lm_heads.{i}.weight`;
    any other name as it is, to be refused.
    """
    parts = name.split(".")
    if len(parts) == 4 and parts[2] == "linear":
        return f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}"
    if len(parts) == 3 and parts[1] == str(layers) and parts[2] == "weight":
        return f"lm_heads.{parts[0]}.weight"
    return name


def _read_tensors(path: Path) -> dict[str, Tensor]:
    file = next((path / name for name in FILES if (path / name).is_file()), None)
    if file is None:
        raise HeadsmithError(f"head {path} has no weights: neither {FILES[0]} nor {FILES[1]}")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    # A cut-off or hostile pickle can raise nearly anything.
    except (SafetensorError, OSError, Exception) as error:
        reason = " ".join(str(error).split())[:200]
        raise HeadsmithError(f"{file} cannot be read ({reason}); it may be cut off") from error
    return tensors
