"""The drafter of a head, whatever its kind, and of everything else that `--drafter` can name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headsmith.errors import HeadsmithError
from headsmith.inference.accept import GREEDY, Rule
from headsmith.inference.drafter_choice import Drafting, GivenText, Lookahead, Ngram
from headsmith.inference.drafters import Drafter, EagleDrafter
from headsmith.inference.drawn import draw_with
from headsmith.inference.given_text import GivenTextDrafter
from headsmith.inference.lookahead import LookaheadDrafter
from headsmith.inference.medusa import MedusaDrafter
from headsmith.inference.ngram import NgramDrafter
from headsmith.inference.prompts import Conversation
from headsmith.inference.ratio import Ratio
from headsmith.inference.small_model import ModelDrafter
from headsmith.inference.tree import Draft, parse_shape
from headsmith.models.heads import Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target


def make_drafter(head: Head, target: Target, shape: Draft, rule: Rule = GREEDY) -> Drafter:
    """A drafter for `head`; HeadsmithError for a shape that heads of its kind cannot draft, or
    cannot draft for `rule`.
    """
    if isinstance(rule, Ratio):
        return draw_with(head, target, shape, rule)
    if isinstance(head, MedusaHead):
        return MedusaDrafter(head, target, shape)
    return EagleDrafter(head, target, shape)


def drafter_source(
    choice: Drafting, target: Target, draft: str, conversations: Sequence[Conversation] = ()
) -> Callable[[], Drafter]:
    """What makes drafters of a choice that is no head, one for each decoder. Whatever they read, a
    small model or a text, is loaded and checked now, and once. `draft` as in `parse_shape`.
    """
    if isinstance(choice, Lookahead):
        return lambda: LookaheadDrafter(choice)
    shape = parse_shape(draft)
    if isinstance(choice, Ngram):
        return lambda: NgramDrafter(choice, shape)
    if isinstance(choice, GivenText):
        ids = _given_ids(choice, target, conversations)
        return lambda: GivenTextDrafter(choice, shape, ids)
    model = Target.load(choice.path, dtype=target.dtype, device=target.device)
    return lambda: ModelDrafter(model, target, shape)


def _given_ids(
    choice: GivenText, target: Target, conversations: Sequence[Conversation]
) -> list[int] | None:
    """The tokens of the file, if there is one; without, every prompt needs a text of its own."""
    if choice.path is None:
        without = next((one for one in conversations if not one.given), None)
        if without is not None:
            raise HeadsmithError(
                f"prompt {without.id} of {without.task} has no given text; add `given` to its row, "
                "or name a file (--drafter text:FILE)"
            )
        return None
    try:
        text = Path(choice.path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise HeadsmithError(f"the given text {choice.path} cannot be read: {fault}") from fault
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])
