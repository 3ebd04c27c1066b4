"""Linear layers of a frozen model on a CPU, with their weights packed once for oneDNN.

A verification pass multiplies a handful of rows. `torch.nn.functional.linear` repacks the weight at
every call for 2 to about 64 rows, which costs more than the product itself: a pass over five tokens
then takes twice as long as one over a single token, and speculation cannot pay. A packed weight
makes one to sixteen rows cost nearly the same.
"""

import torch
from torch import Tensor, nn

from headsmith.models.products import Linear

_OPS = torch.ops.mkldnn


class PackedLinear(nn.Module):
    """y = x W^T + b with a packed float32 weight; x [..., in_features] -> [..., out_features].
    Inference only.
    """

    packed: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        # Not a buffer: an oneDNN tensor can be neither saved nor moved.
        self.packed = _OPS._reorder_linear_weight(weight, None)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return _OPS._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is when it has more."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def packing_helps(tensor: Tensor) -> bool:
    """Whether a weight can be packed here: float32, on the CPU, and oneDNN is in this build of
    torch.
    """
    return (
        tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(_OPS, "_reorder_linear_weight")
        and hasattr(_OPS, "_linear_pointwise")
    )


def pack_linears(module: nn.Module) -> int:
    """Replace every plain linear layer below `module` by its packed form; returns how many were
    replaced.
    """
    replaced = 0
    for name, child in list(module.named_children()):
        plain = type(child) in (nn.Linear, Linear)
        if isinstance(child, nn.Linear) and plain and packing_helps(child.weight):
            setattr(module, name, PackedLinear(child))
            replaced += 1
        else:
            replaced += pack_linears(child)
    return replaced


def parameters_below(module: nn.Module) -> int:
    """Parameters of a module and all below it, those included that are packed."""
    count = sum(one.numel() for one in module.parameters())
    for part in module.modules():
        if isinstance(part, PackedLinear):
            count += part.in_features * part.out_features
            count += 0 if part.bias is None else part.bias.numel()
    return count
