"""Answers that are no language any more: empty, one token over and over, a loop, hardly varied.

They are easy to draft, so that tau over them says nothing about varied text (spec/verifier.md 7,
entry 28). An answer gets the first kind that fits:

    empty      nothing but special tokens and white space
    one_token  the same token REPEATED times or more in a row
    loop       a block of 2 to LONGEST_BLOCK tokens that follows itself at once: three blocks or
               more in a row, LOOP_TOKENS tokens or more altogether, anywhere in the answer
    few_pairs  PAIRS_FROM tokens or more, of whose neighbouring pairs fewer than DISTINCT_PAIRS are
               distinct
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headsmith.inference.metrics import summarise
from headsmith.inference.records import Response

REPEATED = 24
LONGEST_BLOCK = 64
LOOP_TOKENS = 24
PAIRS_FROM = 32
DISTINCT_PAIRS = 0.3
KINDS = {
    "empty": "empty: nothing but special tokens and white space",
    "one_token": f"one token: the same token {REPEATED} times or more in a row",
    "loop": f"loop: a block of 2 to {LONGEST_BLOCK} tokens three times or more in a row, "
    f"{LOOP_TOKENS} tokens or more altogether",
    "few_pairs": f"few pairs: {PAIRS_FROM} tokens or more, fewer than {DISTINCT_PAIRS:.0%} of "
    "whose neighbouring pairs are distinct",
}


def kind_of(ids: Sequence[int], text: str = "text") -> str | None:
    """The kind of degenerate output that these tokens, which read `text`, are; None for none."""
    if not ids or not text.strip():
        return "empty"
    tokens = np.asarray(ids)
    if _longest_run(tokens[1:] == tokens[:-1]) >= REPEATED - 1:
        return "one_token"
    if _loops(tokens):
        return "loop"
    pairs = list(zip(ids, ids[1:], strict=False))
    if len(ids) >= PAIRS_FROM and len(set(pairs)) < DISTINCT_PAIRS * len(pairs):
        return "few_pairs"
    return None


def find_degenerate(
    responses: Sequence[Response], decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """`degenerate` of result.json: the answers of each kind, and tau with and without them.

    `decode` gives the text of output ids without special tokens.
    """
    kinds = [kind_of(one.output_ids, decode(one.output_ids)) for one in responses]
    pairs = list(zip(responses, kinds, strict=True))
    found = [one for one, kind in pairs if kind]
    return {
        "answers": len(found),
        "kinds": {kind: kinds.count(kind) for kind in KINDS},
        "tau": summarise(found)["tau"],
        "tau_of_the_others": summarise([one for one, kind in pairs if not kind])["tau"],
        "which": [
            {"id": one.request.id, "task": one.request.task, "kind": kind}
            for one, kind in pairs
            if kind
        ],
    }


def degenerate_warning(found: dict[str, Any], answers: int) -> str:
    """What to know of the degenerate answers, in a sentence; empty without one."""
    if not found["answers"]:
        return ""
    kinds = ", ".join(
        f"{count} {KINDS[kind].partition(':')[0]}"
        for kind, count in found["kinds"].items()
        if count
    )
    line = f"{found['answers']} of {answers} outputs are degenerate ({kinds})"
    if found["tau"] is None or found["tau_of_the_others"] is None:
        return line
    return (
        f"{line}; what repeats itself is easy to draft: tau is {found['tau']:.2f} over them and "
        f"{found['tau_of_the_others']:.2f} over the others"
    )


def _loops(tokens: np.ndarray) -> bool:
    """A stretch equal to itself `lag` tokens on is `lag` longer than the run of equal pairs."""
    for lag in range(2, min(LONGEST_BLOCK, len(tokens) // 3) + 1):
        run = _longest_run(tokens[lag:] == tokens[:-lag])
        if run + lag >= max(3 * lag, LOOP_TOKENS):
            return True
    return False


def _longest_run(flags: np.ndarray) -> int:
    """Length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return int((edges[1::2] - edges[::2]).max()) if len(edges) else 0
