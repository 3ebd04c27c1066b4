"""What an EAGLE head reads (models/eagle3.py): the taps of accepted rows through norm and `fc`,
and its attention input; with their plain references.

Shapes: T rows of taps, n rows that are read, m taps, H_t target width, H head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headsmith.inference.kernels import runs, use_kernels


def fuse_rows(
    taps: Tensor,
    rows: Tensor,
    weight: Tensor,
    norms: Tensor | None = None,
    whole_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The accepted rows int64 [n] of taps [T, m, H_t], normed as the head's flags say, through
    weight [H, m * H_t] of `fc` -> z [n, H].

    `norms` [m, H_t] are the weights of one norm a tap (fc_norm), `whole_norm` [m * H_t] those of
    one norm over all taps (norm_before_fc); not both.
    """
    assert norms is None or whole_norm is None, "one norm before fc"
    if use_kernels(taps.device):
        from headsmith.inference.kernels.head_input_triton import launch_fuse

        runs("head input")
        return launch_fuse(taps, rows, weight, norms, whole_norm, eps)
    return reference_fuse(taps, rows, weight, norms, whole_norm, eps)


def reference_fuse(
    taps: Tensor,
    rows: Tensor,
    weight: Tensor,
    norms: Tensor | None = None,
    whole_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The same, one operation after the other."""
    read = taps[rows]
    if norms is not None:
        parts = zip(read.unbind(1), norms, strict=True)
        read = torch.stack([F.rms_norm(tap, (len(w),), w, eps) for tap, w in parts], 1)
    flat = read.flatten(1)
    if whole_norm is not None:
        flat = F.rms_norm(flat, (len(whole_norm),), whole_norm, eps)
    return flat @ weight.T


def attention_input(
    embeds: Tensor, z: Tensor, embed_norm: Tensor, hidden_norm: Tensor, eps: float = 1e-6
) -> Tensor:
    """Embeddings and states [n, H], each through its RMS norm of weight [H], side by side: u
    [n, 2 * H].
    """
    if use_kernels(z.device):
        from headsmith.inference.kernels.head_input_triton import launch_input

        runs("head input")
        return launch_input(embeds, z, embed_norm, hidden_norm, eps)
    return reference_input(embeds, z, embed_norm, hidden_norm, eps)


def reference_input(
    embeds: Tensor, z: Tensor, embed_norm: Tensor, hidden_norm: Tensor, eps: float = 1e-6
) -> Tensor:
    """The same, one operation after the other."""
    width = (z.shape[1],)
    first = F.rms_norm(embeds, width, embed_norm, eps)
    return torch.cat([first, F.rms_norm(z, width, hidden_norm, eps)], dim=-1)
