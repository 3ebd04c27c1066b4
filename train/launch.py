"""What `accelerate launch` (or torchrun) asked for: how many processes, and what they share of the
head in training. Reading it imports no torch.

accelerate hands its configuration down in the environment. The plan reads it too, so that it knows
what one process holds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from headsmith.errors import EnvironmentFault, HeadsmithError

Way = Literal["replicated", "fsdp2", "zero2", "zero3"]

# Read by other libraries too, each in its own way: transformers would load the target's weights in
# one process alone and accelerate would wrap what is wrapped here.
_OURS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


@dataclass(frozen=True, slots=True)
class Launch:
    """`processes` in all, `local` of them on this machine, this one being number `rank`.

    way: `replicated` (DDP): all hold the whole head, its gradients and AdamW's moments. `zero2`:
    each holds its share of gradients and moments. `fsdp2` and `zero3`: of the weights too.
    """

    way: Way = "replicated"
    processes: int = 1
    local: int = 1
    rank: int = 0


def read_launch() -> Launch:
    """The launch of this process. HeadsmithError for one that is not supported."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    return Launch(
        way=_way() if processes > 1 else "replicated",
        processes=processes,
        local=int(os.environ.get("LOCAL_WORLD_SIZE", processes)),
        rank=int(os.environ.get("RANK", 0)),
    )


def take_launch() -> Launch:
    """The launch of this process, and from now on no other library follows it by itself.
    EnvironmentFault when what it takes is not installed.
    """
    launch = read_launch()
    if launch.way in ("zero2", "zero3") and find_spec("deepspeed") is None:
        raise EnvironmentFault(
            "this launch takes DeepSpeed, which is not installed: pip install "
            "'headsmith[deepspeed]', or launch with recipes/accelerate/gpu-8-fsdp2.yaml"
        )
    for name in _OURS:
        os.environ.pop(name, None)
    return launch


def _way() -> Way:
    """HeadsmithError with one sentence for what no head can be trained with."""
    if _is_set("ACCELERATE_USE_MEGATRON_LM") or _is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise HeadsmithError(
            "Megatron-LM and accelerate's parallelism_config cut the layers of a model, and a head "
            "has one; launch with a file of recipes/accelerate/"
        )
    if _is_set("ACCELERATE_USE_DEEPSPEED"):
        return _zero()
    if _is_set("ACCELERATE_USE_FSDP"):
        return _fsdp()
    return "replicated"


def _fsdp() -> Way:
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise HeadsmithError(
            f"FSDP version {version} is not supported; set fsdp_version: 2 as in "
            "recipes/accelerate/gpu-8-fsdp2.yaml"
        )
    if _is_set("FSDP_OFFLOAD_PARAMS"):
        raise HeadsmithError(
            "FSDP that offloads to the CPU is not supported; set fsdp_offload_params: false"
        )
    return "fsdp2"


def _zero() -> Way:
    if os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none":
        raise HeadsmithError(
            "a DeepSpeed configuration file is not read, since the recipe sets the optimiser, its "
            "precision and clipping; leave deepspeed_config_file out and set zero_stage: 2 or 3"
        )
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if stage not in ("2", "3"):
        raise HeadsmithError(
            f"DeepSpeed with zero_stage {stage} is not supported; set zero_stage: 2 or 3"
        )
    for what in ("OPTIMIZER", "PARAM"):
        device = os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE", "none")
        if device != "none":
            raise HeadsmithError(
                f"DeepSpeed that offloads to {device} is not supported; leave "
                f"offload_{what.lower()}_device out"
            )
    return "zero3" if stage == "3" else "zero2"


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")
