"""The shape and the data of one training step, the same for every program that is measured.

All numbers are random but for what decides how much there is to do: the target's first choice is
the text's next token and can always be drafted, so that no row may be left out of the loss, and
last states have RMS 1, so that a program that norms them once more reads the same teacher.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A Llama-shaped head on a tied target, and a packed row of `documents` of `length` tokens, the
    last `answers` (share) of each trained. `lm_head` False keeps the draft matrix as it is.
    """

    width: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    intermediate: int = 1536
    vocab: int = 49152
    draft_vocab: int = 8192
    documents: int = 4
    length: int = 256
    answers: float = 1.0
    steps: int = 3
    lm_head: bool = True

    @property
    def tokens(self) -> int:
        return self.documents * self.length

    def text(self) -> str:
        """One line for people."""
        return (
            f"width {self.width}, {self.draft_vocab} of {self.vocab} ids, {self.documents} "
            f"documents of {self.length} tokens, {self.answers:.0%} answers, {self.steps} steps, "
            f"lm_head {'trained' if self.lm_head else 'frozen'}"
        )


def llama(case: Case, **more: Any) -> Any:
    """transformers' LlamaConfig of the case, one layer; `more` are further fields of it."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=case.width,
        intermediate_size=case.intermediate,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
        vocab_size=case.vocab,
        num_hidden_layers=1,
        max_position_embeddings=4096,
        **more,
    )


SMOLLM2 = Case()
SMALL = replace(
    SMOLLM2,
    width=256,
    heads=4,
    kv_heads=2,
    intermediate=1024,
    vocab=4096,
    draft_vocab=2048,
    steps=7,
)
SHAPES = {"smollm2": SMOLLM2, "small": SMALL}


def make_data(case: Case, seed: int = 0) -> dict[str, Any]:
    """What a step reads: ids int64 [T], mask bool [T], lengths, taps [T, 3, H], last [T, H] (post
    norm) with the target's choice int64 [T] and logsumexp [T], embedding [V, H] (the output matrix
    too), draft_ids int64 [V_d] ascending.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    embedding = normal(case.vocab, case.width) * 3 / case.width**0.5
    draft_ids = torch.randperm(case.vocab, generator=g)[: case.draft_vocab].sort().values
    ids = draft_ids[torch.randint(case.draft_vocab, (case.tokens,), generator=g)]
    prompt = round(case.length * (1 - case.answers))
    mask = (torch.arange(case.length) >= prompt).repeat(case.documents)
    last = normal(case.tokens, case.width) + 3 * embedding[ids.roll(-1)]
    while True:
        last = last / last.square().mean(-1, keepdim=True).sqrt()
        said = [part @ embedding.T for part in last.split(256)]
        choice = torch.cat([part.argmax(-1) for part in said])
        wrong = choice != ids.roll(-1)
        if not wrong.any():
            break
        # One in ten thousand tokens has a neighbour that is nearer to the noisy state.
        last = last + wrong[:, None] * embedding[ids.roll(-1)]
    sizes = torch.tensor([0.5, 1.0, 3.0])[:, None]
    return {
        "case": asdict(case),
        "ids": ids,
        "mask": mask,
        "lengths": [case.length] * case.documents,
        "taps": normal(case.tokens, 3, case.width) * sizes,
        "last": last,
        "choice": choice,
        "logsumexp": torch.cat([part.logsumexp(-1) for part in said]),
        "embedding": embedding,
        "draft_ids": draft_ids,
    }
