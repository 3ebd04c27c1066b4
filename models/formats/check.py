"""The check of every export: read back by other code, it must draft what the head drafts."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.models.attention import ragged_attention
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.formats.reader_eagle import Embed, EngineHead
from headsmith.models.formats.reader_medusa import EngineMedusa
from headsmith.models.heads import Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.spans import Span

ROWS, DEPTH, TRIES = 8, 5, 8
# Of the largest logit: what float32 rounds away in sums that are ordered otherwise.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Checked:
    """What was compared: drafts, how many are equal, and the largest difference of a logit as a
    share of the largest one.
    """

    drafts: int
    equal: int
    difference: float

    def __str__(self) -> str:
        return (
            f"{self.equal} of {self.drafts} drafts equal, logits within {self.difference:.1e} of "
            "the largest"
        )


def check_export(
    head: Head, folder: Path, name: str, num_layers: int | None, dtype: torch.dtype
) -> Checked:
    """Read the export in `folder` back and compare its drafts with those of `head`, rounded to
    `dtype` as the export is.

    Raises HeadsmithError if anything differs: taps, draft vocabulary, or a draft.
    """
    rounded = _rounded(head, dtype)
    if isinstance(rounded, MedusaHead):
        ours, theirs = _medusa(rounded, folder, name)
    else:
        ours, theirs = _eagle(rounded, folder, name, num_layers)
    scale = float(ours.abs().max())
    checked = Checked(
        drafts=len(ours),
        equal=int((ours.argmax(-1) == theirs.argmax(-1)).sum()),
        difference=float((ours - theirs).abs().max()) / scale if scale else 0.0,
    )
    # A draft can differ only where two logits are equal within the tolerance.
    if not checked.difference <= TOLERANCE:
        raise HeadsmithError(
            f"the export to {name} drafts otherwise than the head ({checked}); nothing was "
            "written, and this is a fault of headsmith"
        )
    return checked


def _rounded(head: Head, dtype: torch.dtype) -> Head:
    copied = copy.deepcopy(head).to(dtype).float().requires_grad_(False).eval()
    if isinstance(copied, MedusaHead) and copied.shared is not None:
        copied.shared = copied.shared.to(dtype).float()
    return copied


def _eagle(
    head: Eagle3Head, folder: Path, name: str, num_layers: int | None
) -> tuple[Tensor, Tensor]:
    engine = EngineHead(folder, name, num_layers)
    if engine.taps != head.taps:
        raise HeadsmithError(
            f"the export to {name} would read taps {list(engine.taps)} where the head reads "
            f"{list(head.taps)}; nothing was written, and this is a fault of headsmith"
        )
    _same_ids(engine.ids, head.draft_ids, name)
    config, random = head.config, torch.Generator().manual_seed(11)
    ours, theirs = [], []
    for _ in range(TRIES):
        size = (ROWS, config.num_taps, config.target_width)
        taps = torch.randn(size, generator=random)
        tokens = torch.randint(config.vocab_size, (ROWS,), generator=random)
        logits, drafts = chain(head, taps, tokens, DEPTH, lambda ids: embeddings(head, ids))
        ours.append(logits)
        theirs.append(engine.logits(taps, tokens, drafts[:-1], lambda ids: embeddings(head, ids)))
    return torch.cat(ours), torch.cat(theirs)


def _medusa(head: MedusaHead, folder: Path, name: str) -> tuple[Tensor, Tensor]:
    engine = EngineMedusa(folder, name)
    config = head.config
    borrowed = head.shared if head.shared is not None else torch.empty(0)
    if len(engine.ids):
        _same_ids(engine.ids, head.draft_ids, name)
    random = torch.Generator().manual_seed(11)
    last = torch.randn(TRIES, config.hidden_size, generator=random)
    own = [module.weight for module in head.own_lm_heads()] or [borrowed]
    rows = own if config.lm_head == "private" else own * config.num_heads
    ours = torch.stack([head.state(k, last) @ rows[k].T for k in range(config.num_heads)])
    return ours.flatten(0, 1), engine.logits(last, borrowed).flatten(0, 1)


def _same_ids(theirs: Tensor, ours: Tensor, name: str) -> None:
    if not torch.equal(theirs, ours.cpu()):
        raise HeadsmithError(
            f"the export to {name} has another draft vocabulary than the head; nothing was "
            "written, and this is a fault of headsmith"
        )


def embeddings(head: Eagle3Head, ids: Tensor) -> Tensor:
    """Embeddings [n, H] of ids [n]: of the head's own table, else random ones that stand for the
    target's, the same for the same id. A whole random table would be as large as the target's.
    """
    if head.embed_tokens is not None:
        return head.embed_tokens(ids)
    width = head.config.hidden_size
    rows = [
        torch.randn(width, generator=torch.Generator().manual_seed(int(one)))
        for one in ids.tolist()
    ]
    return torch.stack(rows)


@torch.no_grad()
def chain(
    head: Eagle3Head,
    taps: Tensor,
    tokens: Tensor,
    depth: int,
    embed: Embed,
    forced: Sequence[int] = (),
) -> tuple[Tensor, list[int]]:
    """What the head drafts behind n committed rows: logits [depth, V_d] and the target ids.

    taps [n, m, H_t], tokens int64 [n]; embed(ids) are their embeddings [., H]; `forced` ids are
    taken for the first drafts. Every step runs over all rows again, without a cache.
    """
    z, found, drafts = head.fuse(taps), [], []
    ids = tokens
    for step in range(depth):
        rows, layer = len(tokens) + step, head.midlayer
        u = layer.inputs(embed(ids), z)
        cos, sin = head.cos_sin(torch.arange(rows))
        keys, values = layer.key_value(u, cos, sin)
        window = head.config.sliding_window
        attended = ragged_attention(
            layer.query(u, cos, sin), keys, values, [Span(rows)], window=window
        )
        g = layer.output(z, attended)[-1:]
        found.append(head.logits(g))
        best = int(head.draft_ids[found[-1].argmax()])
        drafts.append(forced[step] if step < len(forced) else best)
        ids = torch.cat([ids, torch.tensor(drafts[-1:])])
        z = torch.cat([z, head.feedback(g)])
    return torch.cat(found), drafts
