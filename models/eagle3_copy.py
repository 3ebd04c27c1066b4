"""Attention heads of a fresh EAGLE-3 head that copy: what followed this token the last time?

Answers repeat their prompts and themselves, and a head that cannot look there misses a draft in six
that a search through the text would get right. Training for minutes does not find the circuit, so
it is written down: the heads of the last key/value group

    ask      with a code of the newest token's embedding, x[i+1] in row i,
    compare  with the same code read off the taps of x[j] in row j, x[j] being x[i+1],
    answer   with what makes the logit of x[j+1], whose embedding row j reads, the highest.

The code of a row's own token must come through z, which is also what the logits are made of: it
goes where lm_head hears least. Keys and queries use only what RoPE turns slowly, since a match
counts at any distance. docs/log.md has what this gains.

Shapes: H head width, m H_t inputs of fc, V_d draft vocabulary, c numbers of a code, d head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headsmith.models.eagle3_init import write_values

if TYPE_CHECKING:
    from headsmith.models.eagle3 import Eagle3Head

# A code is made of the embeddings' largest directions but the first, which all tokens share.
DIRECTIONS = 256
# Radians a token: what turns slower than this still matches some dozens of tokens away.
SLOW = 1 / 64
# RMS of the channels of z that hold the code by that of all the rest.
LOUDNESS = 1.3
# Scores of a match, from the first query head to the last: the looser ones hear several matches.
SCORES = (10.0, 20.0)
# Share of the code's variance that the taps must explain.
LEGIBLE = 0.2
# What a full match adds to the logit of the token that followed, in standard deviations of those
# that the taps alone make, and a ridge for the directions in which lm_head has nearly nothing to
# say.
LOGIT, RIDGE = 0.6, 0.1


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a fit knows of a row (models/eagle3_fit.py), means over the rows in float64.

    taps [mH_t, mH_t]: second moments of fc's inputs, each tap divided by its size. own [mH_t, H]:
    of those and the normalised embedding of the same token. embeddings [H, H]: of the latter.
    drafts [V_d, H]: those of the draft ids. count of rows.
    """

    taps: Tensor
    own: Tensor
    embeddings: Tensor
    drafts: Tensor
    count: float


@dataclass(frozen=True, slots=True)
class Copying:
    """What the circuit is made of: code [c, H] of an embedding, and found [c, mH_t], the same code
    of a row's own token in fc's inputs.
    """

    code: Tensor
    found: Tensor

    @classmethod
    def of(cls, head: Eagle3Head, statistics: Statistics, seed: int = 0) -> Copying | None:
        """Deterministic in `seed`. None where no key/value group can be spared, RoPE turns all of
        it fast, or the taps do not tell their own token.
        """
        numbers = len(_slow(head))
        inputs = len(statistics.taps)
        if head.config.num_kv_heads < 2 or not numbers or statistics.count <= 2 * inputs:
            return None
        code = _code(statistics.embeddings, numbers, seed)
        found = torch.linalg.solve(statistics.taps, statistics.own @ code.T).T
        # Codes have variance 1; the fit explains some of it by having many inputs.
        explained = float((found @ statistics.taps * found).sum() / len(found))
        left = (1 - explained) * statistics.count / (statistics.count - inputs)
        return cls(code, found) if 1 - left > LEGIBLE else None

    @torch.no_grad()
    def write(self, head: Eagle3Head, statistics: Statistics, columns: Tensor) -> None:
        """Make the last key/value group of a fitted `head` copy, in place; `columns` [mH_t] are
        the sizes that fc's inputs were divided by.
        """
        numbers, config = len(self.code), head.config
        here = _slow(head).to(columns.device)[:numbers]
        read = head.lm_head.weight.double() * head.norm.weight.double()
        fitted = head.fc.weight.double() * columns
        states = fitted @ statistics.taps @ fitted.T
        logits = ((read @ states) * read).sum(-1).mean().sqrt()
        quiet = _quiet(read, states, numbers)
        heard, size = _write_code(head, fitted, statistics.taps, self.found, columns, quiet)
        attention, width = head.midlayer.self_attn, config.hidden_size
        shape = (config.num_kv_heads, -1, config.head_dim)
        (keys,) = attention.k_proj.weight.unflatten(0, shape)[-1]
        keys.zero_()
        keys[here, width:] = (quiet.T * (size / heard)).to(keys)
        queries = attention.q_proj.weight.unflatten(0, shape)[-1]
        queries.zero_()
        asked = self.code * config.head_dim**0.5 / numbers
        low, high = (math.log(score) for score in SCORES)
        scores = torch.linspace(low, high, len(queries)).exp()
        for query, score in zip(queries, scores.tolist(), strict=True):
            query[here, :width] = (asked * score).to(query)
        _write_answer(head, statistics, read, LOGIT * float(logits))


def _slow(head: Eagle3Head) -> Tensor:
    """Channels of an attention head that RoPE turns slowly, int64 [<= d]."""
    slow = (head.rotary.inv_freq < SLOW).nonzero().flatten().cpu()
    # The Llama layout turns channel n together with channel n + d / 2.
    return torch.cat([slow, slow + head.config.head_dim // 2])


def _code(embeddings: Tensor, numbers: int, seed: int) -> Tensor:
    """The code of an embedding as a matrix [c, H]: large directions, each brought to variance 1 and
    mixed at random, so that any two tokens differ in all parts of it.
    """
    sizes, directions = torch.linalg.eigh(embeddings)
    taken = min(DIRECTIONS, len(sizes) - 1)
    white = directions[:, -1 - taken : -1] / sizes[-1 - taken : -1].clamp(min=1e-9).sqrt()
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(taken, taken, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(mixed).Q[:numbers].to(white) @ white.T


def _quiet(read: Tensor, states: Tensor, numbers: int) -> Tensor:
    """Directions [H, numbers] of z in which lm_head, read [V_d, H], hears least and the guess, of
    second moments states [H, H], says least.
    """
    heard = read.T @ read
    unheard = heard / heard.diagonal().mean() + states / states.diagonal().mean()
    return torch.linalg.eigh(unheard).eigenvectors[:, :numbers]


def _write_code(
    head: Eagle3Head,
    fitted: Tensor,
    moments: Tensor,
    found: Tensor,
    columns: Tensor,
    quiet: Tensor,
) -> tuple[float, float]:
    """Let `fc`, whose weights for inputs of equal size are `fitted` [H, mH_t], say the code of a
    row's own token in the directions quiet [H, c] of z, and nothing else there. Returns the RMS of
    a channel of that code and of all of z.
    """
    fitted = fitted - quiet @ (quiet.T @ fitted)
    rest = (fitted @ moments * fitted).sum() / len(fitted)
    said = (found @ moments * found).sum() / len(found)
    found = found * LOUDNESS * (rest / said).sqrt()
    head.fc.weight.copy_((fitted + quiet @ found) / columns)
    heard = LOUDNESS**2 * rest
    return float(heard.sqrt()), float((rest + heard * len(found) / len(fitted)).sqrt())


def _write_answer(head: Eagle3Head, statistics: Statistics, read: Tensor, logit: float) -> None:
    """Values and outputs that take an embedding to what raises its own token's logit most, of the
    rank that one group has room for: by `logit` on average, in units of a state of RMS 1.
    """
    embeddings, own = statistics.embeddings, statistics.drafts
    width = read.shape[1]
    eye = torch.eye(width, dtype=read.dtype, device=read.device)
    heard = read.T @ read / len(read)
    raising = torch.linalg.solve(heard + RIDGE * heard.diagonal().mean() * eye, read.T)
    spread = own.T @ own
    spread += 1e-3 * spread.diagonal().mean() * eye
    part = torch.linalg.solve(spread, own.T @ raising.T)
    # What all embeddings share would raise the same logits in every row.
    common = torch.linalg.eigh(embeddings).eigenvectors[:, -1:]
    part = part - common @ (common.T @ part)
    outcome = part.T @ embeddings @ part
    kept = torch.linalg.eigh(outcome).eigenvectors[:, -head.config.head_dim :]
    reached = ((own @ part @ kept @ kept.T) * read).sum(-1).mean().clamp(min=1e-12)
    last = head.config.num_kv_heads - 1
    write_values(head, part @ kept, kept * (logit / reached), slice(last, last + 1))
