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

from headsmith.models.eagle3_copy import Copying, Statistics
from headsmith.models.eagle3_init import write_values

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

    inputs [p, p] of x x', cross [p, H] of x y', own [m H_t, H] of the taps in x and the embedding
    of their own token, squares [H] of y squared, count [1] of rows. They add up over packed rows
    and over ranks.
    """

    inputs: Tensor
    cross: Tensor
    own: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, head: Eagle3Head, device: torch.device) -> Moments:
        p, width = inputs_of_fit(head.config), head.config.hidden_size
        shapes = ((p, p), (p, width), (p - width, width), (width,), (1,))
        return cls(*(torch.zeros(s, dtype=torch.float64, device=device) for s in shapes))

    def add(self, x: Tensor, y: Tensor, own: Tensor) -> None:
        """Rows x [n, p], y [n, H] and own [n, H]."""
        self.inputs += x.T @ x
        self.cross += x.T @ y
        self.own += x[:, : len(self.own)].T @ own
        self.squares += y.square().sum(0)
        self.count += len(x)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inputs, self.cross, self.own, self.squares, self.count


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
    def add(self, taps: Tensor, own: Tensor, ids: Tensor, last: Tensor) -> None:
        """Rows of the target: taps [n, m, H_t] and id [n] of token i, id [n] and last state
        [n, H_t] of token i+1.
        """
        head = self.head
        read = head.read(taps.to(head.fc.weight)) / self.sizes[:, None]
        quiet = (read.square().mean(-1).sqrt() < LOUD).all(1)
        x = torch.cat([read.flatten(1), self._embeds(ids).to(read)], 1)
        y = last.to(x) if self.narrowing is None else last.to(x) @ self.narrowing.T
        self.moments.add(x[quiet], y[quiet], self._embeds(own[quiet]).to(x))

    def _embeds(self, ids: Tensor) -> Tensor:
        """Embeddings as the layer reads them, [n, H]."""
        embeds = self.head.embed(self.target, ids)
        return self.head.midlayer.input_layernorm(embeds.to(self.head.fc.weight))

    @torch.no_grad()
    def apply(self) -> None:
        """Write the least-squares solution into the head's weights, and what copies
        (models/eagle3_copy.py). The moments are spent.
        """
        head, moments = self.head, self.moments
        count = moments.count.clamp(min=1)
        solution = _solve(moments, self.head.config.target_width)
        # The head's final norm takes a state of RMS 1; its weight gives each channel its size back,
        # and all of them the confidence of the guess.
        channels = self._channels().clamp(min=1e-6)
        solution = solution / channels
        guessed = (moments.inputs @ solution * solution).sum() / count / len(channels)
        head.norm.weight.copy_(channels * guessed.clamp(min=0).sqrt().clamp(min=1e-3))
        of_taps, of_embedding = solution.split([head.fc.in_features, head.config.hidden_size])
        per_column = self.sizes.double().repeat_interleave(head.config.target_width)
        head.fc.weight.copy_((of_taps / per_column[:, None]).T)
        head.midlayer.mlp.down_proj.weight.zero_()
        known = self._statistics()
        copying = Copying.of(head, known)
        groups = head.config.num_kv_heads - (copying is not None)
        self._through_attention(of_embedding, known.embeddings, groups)
        if copying is not None:
            copying.write(head, known, per_column)

    def _channels(self) -> Tensor:
        """Sizes of the channels of what must be guessed, [H]: those that the target's own norm
        gives them, or as they were seen.
        """
        own = self.target.last_norm() if self.narrowing is None else None
        if own is not None:
            return own.to(self.moments.squares).abs()
        return (self.moments.squares / self.moments.count.clamp(min=1)).sqrt()

    def _statistics(self) -> Statistics:
        moments, start = self.moments, self.head.fc.in_features
        count = moments.count.clamp(min=1)
        # In place: at size there is no room for a second matrix.
        moments.inputs /= count
        return Statistics(
            taps=moments.inputs[:start, :start],
            own=moments.own / count,
            embeddings=moments.inputs[start:, start:],
            drafts=self._embeds(self.head.draft_ids.to(count.device)).double(),
            count=float(count),
        )

    def _through_attention(self, part: Tensor, spread: Tensor, groups: int) -> None:
        """Values and outputs that add embedding @ part, `part` [H, H], of the rank that the first
        `groups` groups have room for: the directions of the result that vary most; spread [H, H]
        are the embeddings' second moments.
        """
        rank = min(groups * self.head.config.head_dim, len(part))
        kept = torch.linalg.eigh(part.T @ spread @ part).eigenvectors[:, -rank:]
        write_values(self.head, part @ kept, kept, slice(groups))


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
