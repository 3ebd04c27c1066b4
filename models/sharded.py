"""A target whose blocks lie in shares over the processes of a machine, since it fits none of them.

Each process holds its share of every block, and a block's weights are whole in each only while it
runs (torch's fully_shard). So every process runs its own tokens, and what it computes is what a
whole target computes, to the last bit; but all must go through the blocks together. A process that
has a pass to run tells the others, and those that have none run along with one token of their own
(`Shares.settle`). Embeddings, final norm and output head are small and whole everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from headsmith.errors import HeadsmithError
from headsmith.models import loading


class Shares:
    """What the processes that share a target must agree on."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device

    def join(self, runs: bool) -> bool:
        """Called by all of them, by each before its next pass (`runs`) or when it has none; whether
        any has one.
        """
        running = torch.tensor([int(runs)], device=self.device)
        dist.all_reduce(running, op=dist.ReduceOp.MAX, group=self.group)
        return bool(running.item())


def load_sharded(
    path: str, revision: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Shares]:
    """The target, read by the first process alone and handed out block by block: no process ever
    holds more of it on its device than its share and one block. Called by all processes.
    """
    tokenizer = loading.load_tokenizer(path, revision)
    group, mesh = _machine(device)
    model = _skeleton(path, revision, dtype)
    if dist.get_rank() == 0:
        model = loading.load_model(path, revision, dtype)[0]
    _check_alike(model, path)
    decoder = model.get_decoder()
    blocks = loading.find_blocks(decoder, model.config.get_text_config().num_hidden_layers)
    model.requires_grad_(False)
    for block in blocks:
        for module in block.modules():
            _receive(module, device)
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            _receive(module, device)
    model.tie_weights()
    ends = {weight for weight in decoder.parameters() if not hasattr(weight, "placements")}
    # A root over all blocks, which then fetch the next one's weights while one runs. transformers
    # knows by the very class what a model can give back.
    kind = type(decoder)
    fully_shard(decoder, mesh=mesh, ignored_params=ends)
    decoder.__class__ = kind
    return model, tokenizer, Shares(group, device)


def _machine(device: torch.device) -> tuple[Any, Any]:
    """The processes of this machine, as a group and as a mesh."""
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % local:
        local = world
    mesh = init_device_mesh(device.type, (world // local, local), mesh_dim_names=("all", "machine"))
    machine = mesh["machine"]
    return machine.get_group(), machine


def _skeleton(path: str, revision: str | None, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights."""
    place, extra = loading.locate(path)
    try:
        config = AutoConfig.from_pretrained(place, revision=revision, **extra)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise HeadsmithError(f"target {path} has no config that loads: {reason}") from error


def _tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """A module's own weights and buffers: (where, under which name, what)."""
    for place in (module._parameters, module._buffers):
        for name, tensor in place.items():
            if tensor is not None:
                yield place, name, tensor


def _receive(module: nn.Module, device: torch.device) -> None:
    """Make the module's own tensors those of the first process, on `device`."""
    for place, name, tensor in list(_tensors(module)):
        if tensor.is_meta:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        else:
            whole = tensor.detach().to(device).contiguous()
        dist.broadcast(whole, src=0)
        weight = isinstance(tensor, nn.Parameter)
        place[name] = nn.Parameter(whole, requires_grad=False) if weight else whole


def _check_alike(model: PreTrainedModel, path: str) -> None:
    """HeadsmithError when the model that was read has other tensors than its configuration says, as
    quantised ones do.
    """
    here = [
        [(name, kind, list(t.shape), str(t.dtype)) for name, t in found(remove_duplicate=False)]
        for kind, found in (("weight", model.named_parameters), ("buffer", model.named_buffers))
    ]
    read = [here]
    dist.broadcast_object_list(read, src=0)
    every: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(every, read[0] == here)
    if not all(every):
        raise HeadsmithError(
            f"target {path} cannot be sharded: its file holds other tensors than its config.json "
            "describes (it may be quantised); set target.parallel=replicated, or capture its "
            "features once with `headsmith data capture` and train from those"
        )
