"""Experiment trackers, all through accelerate: `output.tracker: none | wandb | tensorboard`."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from accelerate import Accelerator

from headsmith.errors import EnvironmentFault
from headsmith.train.recipe import Recipe


def check_tracker(name: str) -> list[str] | None:
    """What to hand to `Accelerator(log_with=...)`; EnvironmentFault if the library is missing."""
    if name == "none":
        return None
    if find_spec(name) is None:
        raise EnvironmentFault(
            f"output.tracker is {name}, which is not installed: run `pip install {name}` or set "
            "output.tracker=none"
        )
    if name == "wandb" and not _wandb_key():
        # Without a key wandb would stop and ask for one; `wandb sync` uploads the run later.
        os.environ.setdefault("WANDB_MODE", "offline")
    return [name]


def start_tracker(accelerator: Accelerator, recipe: Recipe) -> None:
    """Open the tracker, if the recipe names one, with the flattened recipe as its config."""
    if recipe.output.tracker != "none":
        accelerator.init_trackers(recipe.output.project, config=_flat(recipe.model_dump()))


def log(accelerator: Accelerator, record: Mapping[str, Any], step: int) -> None:
    """Send the scalars of a record; per-step lists become `name/0`, `name/1`, ..."""
    scalars = {k: v for k, v in _flat(record).items() if isinstance(v, int | float)}
    accelerator.log(scalars, step=step)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list | tuple):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}/"))
        else:
            flat[prefix + key] = value if isinstance(value, int | float) else str(value)
    return flat


def _wandb_key() -> bool:
    """Whether wandb could log in: a key in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return bool(host and netrc.netrc().authenticators(host))
    except (OSError, netrc.NetrcParseError):
        return False
