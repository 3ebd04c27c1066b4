"""Which recipe keys mean something for which kind of head; the others are refused, not ignored.

A key at its default is never refused, so a recipe that was written out in full can be read again.
`train.unroll_steps` and `train.unroll_growth` are the exception: recipes that compare kinds of
heads differ in their head section only, and Medusa heads, which have no unroll, pass over them.
"""

from __future__ import annotations

from typing import Any

from headsmith.train.head_sizes import HeadSizes

EAGLE_ONLY = {
    "head": ("taps", "fc_norm", "norm_output", "init", "fit_rows", *HeadSizes.model_fields),
    "train": ("loss", "kl_scale", "kl_decay"),
}
MEDUSA_ONLY = {"head": ("num_heads", "num_layers", "lm_head", "loss", "ce_weight")}
# What to say instead of a key of the same meaning.
INSTEAD = {"train.loss": "head.loss", "head.loss": "train.loss"}


def check_applies(recipe: Any) -> None:
    """ValueError with one sentence for the first key that the recipe's kind of head does not read.

    `recipe` is a `headsmith.train.recipe.Recipe`.
    """
    head = recipe.head
    medusa = head.kind == "medusa"
    for section, keys in (EAGLE_ONLY if medusa else MEDUSA_ONLY).items():
        for key in keys:
            if _set(getattr(recipe, section), key):
                name = f"{section}.{key}"
                remedy = f"set {INSTEAD[name]}" if name in INSTEAD else "leave it out"
                raise ValueError(f"{name} means nothing for head.kind {head.kind}; {remedy}")
    if medusa:
        _check_medusa(head)
    elif head.init != "linear" and _set(head, "fit_rows"):
        raise ValueError(f"head.fit_rows means nothing for head.init {head.init}; leave it out")


def _check_medusa(head: Any) -> None:
    if head.lm_head == "truncated" and head.draft_vocab_size is None:
        raise ValueError("head.lm_head truncated needs head.draft_vocab_size, the number of ids")
    if head.lm_head != "truncated" and head.draft_vocab_size is not None:
        raise ValueError(
            f"head.draft_vocab_size means nothing for head.lm_head {head.lm_head}, which drafts "
            "every id; set head.lm_head=truncated or leave it out"
        )
    if head.loss != "mix" and _set(head, "ce_weight"):
        raise ValueError("head.ce_weight is the share of ce in head.loss mix; set that too")


def _set(section: Any, key: str) -> bool:
    return bool(getattr(section, key) != type(section).model_fields[key].default)
