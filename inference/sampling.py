"""Sampling settings: what is done to the target's logits before a token is chosen.

In this order, which is that of transformers (docs/rules.md): logit bias, repetition penalty,
frequency and presence penalty, temperature, top-k, top-p, min-p. No torch here: settings are
checked before anything is loaded; `headsmith.inference.processors` applies them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headsmith.errors import HeadsmithError


@dataclass(frozen=True, slots=True)
class Shaping:
    """The settings besides temperature; the defaults change nothing.

    `bias` pairs of token id and what is added to its logit. `repetition` counts the prompt,
    `presence` and `frequency` only what was written behind it, as in vLLM.
    """

    bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise HeadsmithError(f"top-k is {self.top_k}; it must be 1 or more")
        if not 0 < self.top_p <= 1:
            raise HeadsmithError(f"top-p is {self.top_p}; it must be above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            raise HeadsmithError(f"min-p is {self.min_p}; it must be 0 to 1")
        if not 0 < self.repetition < math.inf:
            raise HeadsmithError(f"repetition-penalty is {self.repetition}; it must be above 0")
        for name in ("presence", "frequency"):
            if not math.isfinite(value := getattr(self, name)):
                raise HeadsmithError(f"{name}-penalty is {value}; it must be a finite number")

    @property
    def penalises(self) -> bool:
        """Whether the text before a token changes its logits."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    @property
    def adjusts(self) -> bool:
        """Whether logits change before temperature, so that the argmax may be another."""
        return self.penalises or bool(self.bias)

    @property
    def cuts(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    def describe(self) -> dict[str, Any]:
        """The settings for `result.json`, by the name of their option; None is not set."""
        return {
            "top_k": self.top_k,
            "top_p": self.top_p if self.top_p < 1 else None,
            "min_p": self.min_p or None,
            "repetition_penalty": self.repetition if self.repetition != 1 else None,
            "presence_penalty": self.presence or None,
            "frequency_penalty": self.frequency or None,
            "logit_bias": {str(token): value for token, value in self.bias} or None,
        }


PLAIN = Shaping()

# Names in `Shaping.describe`, and those of the settings that only leave out unlikely tokens.
_NAMES = tuple(PLAIN.describe())
_CUTS = ("top_k", "top_p", "min_p")


def in_words(setup: Mapping[str, Any]) -> list[str]:
    """The settings that are set, for a title: `setup` of `result.json` as words."""
    words = []
    for name in _NAMES:
        value = setup.get(name)
        if value is not None:
            shown = f"of {len(value)} ids" if name == "logit_bias" else f"{value:g}"
            words.append(f"{_option(name)} {shown}")
    return words


def refuse_for(rule: str, shaping: Shaping) -> None:
    """HeadsmithError that names a setting which the rule of that name can do nothing with."""
    given = [name for name, value in shaping.describe().items() if value is not None]
    cuts = [name for name in given if name in _CUTS]
    if rule == "greedy" and cuts:
        raise HeadsmithError(
            f"{_option(cuts[0])} means nothing for rule greedy, which takes the likeliest token "
            "whatever is cut off behind it; add --rule sample"
        )
    if rule == "typical" and given:
        raise HeadsmithError(
            f"rule typical has no {_option(given[0])}: it keeps what passes a bar of its own, and "
            "draws nothing; take --rule sample"
        )


def parse_bias(given: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """`ID=VALUE` texts as pairs of a token id and a finite number. Raises HeadsmithError."""
    pairs: dict[int, float] = {}
    for text in given:
        token, _, value = text.partition("=")
        try:
            number, bias = int(token), float(value)
        except ValueError as fault:
            raise HeadsmithError(
                f"logit-bias {text!r} is not ID=VALUE; give for example 198=-5"
            ) from fault
        if number < 0 or not math.isfinite(bias):
            raise HeadsmithError(
                f"logit-bias {text!r} needs a token id from 0 and a finite number; give for "
                "example 198=-100 to forbid a token"
            )
        if number in pairs:
            raise HeadsmithError(f"logit-bias names token {number} twice; name each token once")
        pairs[number] = bias
    return tuple(sorted(pairs.items()))


def _option(name: str) -> str:
    return name.replace("_", "-")
