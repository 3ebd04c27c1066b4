"""Reading heads strictly: engines stay silent about a tensor that is missing, unknown or misshaped,
and then accept next to nothing (spec/engines.md 5).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headsmith.errors import HeadsmithError


def load_strictly(head: nn.Module, path: Path, tensors: dict[str, Tensor]) -> None:
    """Load the tensors of the checkpoint `path` into `head`, in place.

    Raises HeadsmithError when one is missing, unknown, of another shape, or holds NaN or infinity.
    """
    expected = head.state_dict()
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        announced = "which its config does not announce"
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, {announced}"
        raise HeadsmithError(
            f"head {path} {what}; an engine would load it silently and accept next to nothing"
        )
    for name, tensor in tensors.items():
        check_shape(path, name, tensor, expected[name].shape)
    head.load_state_dict(tensors)
    for name, parameter in head.named_parameters():
        check_finite(path, name, parameter)


def check_shape(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises HeadsmithError unless the tensor has the shape that the config implies."""
    if tensor.shape != shape:
        raise HeadsmithError(
            f"head {path}: {name} is {list(tensor.shape)}, its config asks for {list(shape)}"
        )


def check_finite(path: Path, name: str, tensor: Tensor) -> None:
    """Raises HeadsmithError if the tensor holds NaN or infinity."""
    if not torch.isfinite(tensor).all():
        raise HeadsmithError(
            f"head {path}: {name} holds NaN or infinity; the run that wrote it diverged"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a head; HeadsmithError says what is wrong with it."""
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise HeadsmithError(
            f"{path.parent} is not a head: there is no {path.name} in it"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HeadsmithError(f"{path} is not valid JSON ({error}); it may be cut off") from error
    if not isinstance(raw, dict):
        raise HeadsmithError(f"{path} holds no JSON object; it was not written for a head")
    return raw


def _unpickle(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    # A cut-off or hostile pickle can raise nearly anything.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise HeadsmithError(f"{path} cannot be read ({reason}); it may be cut off") from error
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a single-file, sharded or pickled checkpoint."""
    index, single, pickled = (
        path / name
        for name in ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")
    )
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = [path / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    elif pickled.is_file():
        return _unpickle(pickled)
    else:
        raise HeadsmithError(
            f"head {path} has no weights: neither model.safetensors nor pytorch_model.bin"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                tensors |= {name: handle.get_tensor(name) for name in handle.keys()}
        except (SafetensorError, OSError) as error:
            raise HeadsmithError(
                f"{file} cannot be read ({error}); it is missing or cut off"
            ) from error
    return tensors
