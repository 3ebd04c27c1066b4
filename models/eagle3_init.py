"""How a fresh EAGLE-3 head begins. A head that trains for minutes stays near its beginning, so all
parts of its layer must speak equally loudly there (measured in docs/log.md).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from headsmith.models.eagle3 import Eagle3Head


@torch.no_grad()
def initialise(head: "Eagle3Head", target_rows: Tensor, seed: int) -> None:
    """Give `head` its first weights, in place: matrices that keep the RMS of what they read,
    queries equal to their keys, and as lm_head the target's rows [V_d, H] of the draft ids
    (spec/eagle.md 1.5).

    A row whose query equals its key reads mostly itself. That is the only way for the embedding of
    the newest token into the state; attention that begins at random averages it away.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, module.in_features**-0.5, generator=generator)
    attention, config = head.midlayer.self_attn, head.config
    keys = attention.k_proj.weight.unflatten(0, (config.num_kv_heads, config.head_dim))
    queries = keys.repeat_interleave(config.num_heads // config.num_kv_heads, 0)
    attention.q_proj.weight.copy_(queries.flatten(0, 1))
    head.lm_head.weight.copy_(target_rows.float())


@torch.no_grad()
def narrowed(rows: Tensor, width: int) -> Tensor:
    """Rows of a table [n, H_t] in the `width` directions that hold most of it: float32 [n, width].

    What a head narrower than its target begins with, for embeddings and for lm_head: of all linear
    maps to that width it keeps the most.
    """
    rows = rows.float()
    directions = torch.linalg.eigh(rows.T @ rows).eigenvectors
    return rows @ directions[:, -width:]


@torch.no_grad()
def balance_taps(head: "Eagle3Head", taps: Tensor) -> Tensor:
    """Scale the columns of a fresh `fc` by the sizes of real `taps` [n, m, H_t], so that all taps
    weigh the same in z and z has RMS 1. Returns the sizes [m].

    Deep layers of a target are an order of magnitude louder than early ones, and a loud z drowns
    what attention and MLP add to it. Medians over the rows, for a few tokens are huge (the sink).
    """
    sizes = head.read(taps.to(head.fc.weight)).square().mean(-1).sqrt().median(0).values
    sizes = sizes.clamp(min=head.config.rms_norm_eps)
    head.fc.weight.div_(sizes.repeat_interleave(head.config.target_width))
    return sizes


@torch.no_grad()
def write_values(head: "Eagle3Head", values: Tensor, outputs: Tensor, groups: slice) -> None:
    """Let the key/value groups `groups` of attention add embedding @ values @ outputs.T to the
    state of a row that reads one row alone: values [H, r], outputs [H, r], of any r that the
    groups have room for.
    """
    attention, config = head.midlayer.self_attn, head.config
    width, d, shares = config.hidden_size, config.head_dim, config.num_heads // config.num_kv_heads
    rank = values.shape[1]
    # As loud as the other matrices; the outputs take the rest.
    loudness = values.square().mean().sqrt().clamp(min=1e-12) * (2 * width) ** 0.5
    rows = attention.v_proj.weight.unflatten(0, (-1, d))[groups].flatten(0, 1)
    rows[:rank] = 0.0
    rows[:rank, :width] = (values.T / loudness).to(rows)
    room = outputs.new_zeros(width, len(rows))
    room[:, :rank] = outputs * loudness / shares
    columns = attention.o_proj.weight.unflatten(1, (-1, shares, d))[:, groups]
    columns.copy_(room.view(width, -1, 1, d).expand_as(columns))
