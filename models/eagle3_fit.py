"""A fresh EAGLE-3 head that is right before it has trained: the best linear guess.

What the head must say of row i, the target's last state of token i+1, is to a good part a linear
function of what it reads there: the taps of token i and the embedding of token i+1. Least squares
finds that function in one pass over some rows, and all of it fits into the head: `fc` holds the
part of the taps, values and outputs of attention the part of the embedding, for a fresh row reads
itself (models/eagle3_init.py). The MLP begins silent. docs/log.md has what this gains.

Shapes: n loss rows, m taps, H_t target width, H head width, p = m H_t + H inputs of the fit, h
heads, g key/value heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headsmith.models.eagle3 import Eagle3Head
    from headsmith.models.eagle3_config import Eagle3Config
    from headsmith.models.target import Target

# Added to the inputs' second moments, as a share of them.
RIDGE = 0.003
# A row with a tap this many times louder than usual (the sink) would decide the whole fit.
LOUD = 8.0


def inputs_of_fit(config: Eagle3Config) -> int:
    """p."""
    return config.num_taps * config.target_width + config.hidden_size


@dataclass(slots=True)
class Moments:
    """Sums over rows of products of the fit's inputs x and of what they must give, y: float64.

    inputs [p, p] of x x', cross [p, H] of x y', squares [H] of y squared, count [1] of rows. They
    add up over packed rows and over ranks.
    """

    inputs: Tensor
    cross: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, head: Eagle3Head, device: torch.device) -> Moments:
        p, width = inputs_of_fit(head.config), head.config.hidden_size
        shapes = ((p, p), (p, width), (width,), (1,))
        return cls(*(torch.zeros(s, dtype=torch.float64, device=device) for s in shapes))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Rows x [n, p] and y [n, H]."""
        self.inputs += x.T @ x
        self.cross += x.T @ y
        self.squares += y.square().sum(0)
        self.count += len(x)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inputs, self.cross, self.squares, self.count


class LinearFit:
    """Gathers `moments` and puts the fit into `head`, whose taps are balanced and weigh `sizes` [m]
    (`balance_taps`).
    """

    def __init__(self, head: Eagle3Head, target: Target, sizes: Tensor) -> None:
        self.head, self.target = head, target
        self.sizes = sizes.to(target.device)
        self.moments = Moments.zeros(head, target.device)
        self.narrowing = _narrowing(head, target)

    @torch.no_grad()
    def add(self, taps: Tensor, ids: Tensor, last: Tensor) -> None:
        """Rows of the target: taps [n, m, H_t] of token i, id [n] and last state [n, H_t] of token
        i+1.
        """
        head = self.head
        read = head.read(taps.to(head.fc.weight)) / self.sizes[:, None]
        quiet = (read.square().mean(-1).sqrt() < LOUD).all(1)
        embeds = head.embed(self.target, ids).to(read)
        x = torch.cat([read.flatten(1), head.midlayer.input_layernorm(embeds)], 1)
        y = last.to(x) if self.narrowing is None else last.to(x) @ self.narrowing.T
        self.moments.add(x[quiet], y[quiet])

    @torch.no_grad()
    def apply(self) -> None:
        """Write the least-squares solution into the head's weights."""
        head, moments = self.head, self.moments
        count = moments.count.clamp(min=1)
        solution = _solve(moments, self.head.config.target_width)
        # The head's final norm takes a state of RMS 1; its weight gives each channel its size back,
        # and all of them the confidence of the guess.
        channels = (moments.squares / count).sqrt().clamp(min=1e-6)
        solution = solution / channels
        guessed = (moments.inputs @ solution * solution).sum() / count / len(channels)
        head.norm.weight.copy_(channels * guessed.clamp(min=0).sqrt().clamp(min=1e-3))
        of_taps, of_embedding = solution.split([head.fc.in_features, head.config.hidden_size])
        per_column = self.sizes.double().repeat_interleave(head.config.target_width)
        head.fc.weight.copy_((of_taps / per_column[:, None]).T)
        start = head.fc.in_features
        self._through_attention(of_embedding, moments.inputs[start:, start:] / count)
        head.midlayer.mlp.down_proj.weight.zero_()

    def _through_attention(self, part: Tensor, spread: Tensor) -> None:
        """Values and outputs that add embedding @ part, `part` [H, H], of the rank that the values
        have room for: the directions of the result that vary most; spread [H, H] are the
        embeddings' second moments.
        """
        attention, config = self.head.midlayer.self_attn, self.head.config
        width, d, groups = config.hidden_size, config.head_dim, config.num_kv_heads
        rank = min(groups * d, width)
        kept = torch.linalg.eigh(part.T @ spread @ part).eigenvectors[:, -rank:]
        values, outputs = (part @ kept).T, kept
        # As loud as the other matrices; the outputs take the rest.
        loudness = values.square().mean().sqrt().clamp(min=1e-12) * (2 * width) ** 0.5
        attention.v_proj.weight[:rank] = 0.0
        attention.v_proj.weight[:rank, :width] = (values / loudness).to(attention.v_proj.weight)
        shares = config.num_heads // groups
        room = outputs.new_zeros(width, groups * d)
        room[:, :rank] = outputs * loudness / shares
        room = room.view(width, groups, 1, d).expand(-1, -1, shares, -1)
        attention.o_proj.weight.copy_(room.flatten(1))


def _solve(moments: Moments, block: int) -> Tensor:
    """Ridge regression [p, H]; the ridge of each input is a share of the mean square of its block
    of `block` inputs. It stays in the moments: at size there is no room for a second matrix.
    """
    squares = moments.inputs.diagonal()
    blocks = torch.cat([part.mean().expand(len(part)) for part in squares.split(block)])
    squares += (RIDGE * blocks).clamp(min=1e-6)
    return torch.linalg.solve(moments.inputs, moments.cross)


def _narrowing(head: Eagle3Head, target: Target) -> Tensor | None:
    """What takes a last state of the target to the one for which the head's lm_head gives the
    nearest logits, [H, H_t]; None for a head as wide as its target, whose lm_head is the target's.
    """
    if head.config.hidden_size == target.hidden_size:
        return None
    rows = target.head_weight[head.draft_ids.to(target.device)].to(head.lm_head.weight)
    return torch.linalg.lstsq(head.lm_head.weight, rows).solution
