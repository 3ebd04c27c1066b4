"""`--drafter`: what it can say, read and checked before anything is loaded.

    head                                  an EAGLE or Medusa head
    none                                  plain decoding
    ngram[:MIN,MAX[,PICK]]                prompt lookup; PICK is longest, recent or first
    lookahead[:WINDOW,LEVEL,GUESSES[,prompt]]   Lookahead decoding
    model:PATH                            an independent small model with the target's tokens
    text[:FILE]                           given text: FILE, or else each prompt's own `given`

`str` of a choice is its whole form, options that were left out included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from headsmith.errors import HeadsmithError

if TYPE_CHECKING:
    from headsmith.inference.tree import Draft

FORMS = (
    "head, none, ngram[:MIN,MAX[,longest|recent|first]], "
    "lookahead[:WINDOW,LEVEL,GUESSES[,prompt]], model:PATH, text[:FILE]"
)
PICKS = ("longest", "recent", "first")
RUNS = ("chain", "tree")


@dataclass(frozen=True, slots=True)
class FromHead:
    """Drafts come from a trained head."""

    def __str__(self) -> str:
        return "head"


@dataclass(frozen=True, slots=True)
class Nothing:
    """No drafts: plain decoding."""

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class Ngram:
    """Prompt lookup (spec/medusa.md 5.2): the last `minimum` to `maximum` tokens are looked up in
    prompt and answer, and what followed them there is drafted.

    `pick`: longest is the longest match, and among these the latest; first is the longest, and
    among these the earliest (vLLM's); recent is the latest match of `minimum` tokens or more.
    """

    minimum: int = 2
    maximum: int = 4
    pick: str = "longest"
    shapes: ClassVar[tuple[str, ...]] = RUNS

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise HeadsmithError(
                f"drafter {self}: n-grams of {self.minimum} to {self.maximum} tokens are none; "
                "give for example ngram:2,4"
            )
        if self.pick not in PICKS:
            raise HeadsmithError(
                f"drafter {self}: {self.pick!r} is no way to pick a match; give {', '.join(PICKS)}"
            )

    def __str__(self) -> str:
        return f"ngram:{self.minimum},{self.maximum},{self.pick}"


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Lookahead decoding (spec/medusa.md 5.1): a window of `window` columns, n-grams of `level`
    tokens, up to `guesses` guesses a pass. The authors' defaults. It is its own draft shape.

    `from_prompt`: the n-grams of prompt and answer are guesses too.
    """

    window: int = 7
    level: int = 5
    guesses: int = 7
    from_prompt: bool = False
    shapes: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.window < 1 or self.level < 2 or self.guesses < 1:
            raise HeadsmithError(
                f"drafter {self}: window and guesses must be at least 1 and level at least 2; give "
                "for example lookahead:7,5,7"
            )

    @property
    def nodes(self) -> int:
        """Tokens of window and guesses; nodes alike are one, so most trees are smaller."""
        window = self.window - 1 + self.window * (self.level - 2)
        return window + self.guesses * (self.level - 1)

    @property
    def depth(self) -> int:
        """Of the last column of the window, or of a guess."""
        return max(self.window + self.level - 3, self.level - 1)

    def __str__(self) -> str:
        prompt = ",prompt" if self.from_prompt else ""
        return f"lookahead:{self.window},{self.level},{self.guesses}{prompt}"


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A whole causal language model that drafts by itself; `path` as of a target."""

    path: str
    shapes: ClassVar[tuple[str, ...]] = (*RUNS, "static")

    def __str__(self) -> str:
        return f"model:{self.path}"


@dataclass(frozen=True, slots=True)
class GivenText:
    """A text that the answer is expected to follow: that of `path`, or the request's own."""

    path: str | None = None
    shapes: ClassVar[tuple[str, ...]] = RUNS

    def __post_init__(self) -> None:
        if self.path is not None and not Path(self.path).is_file():
            raise HeadsmithError(f"drafter {self}: there is no file {self.path}")

    def __str__(self) -> str:
        return "text" if self.path is None else f"text:{self.path}"


Drafting = Ngram | Lookahead | SmallModel | GivenText
Choice = FromHead | Nothing | Drafting


def parse_drafter(text: str) -> Choice:
    """The choice of a `--drafter`; HeadsmithError for what is none."""
    kind, colon, rest = text.partition(":")
    try:
        if text in ("head", "none"):
            return FromHead() if text == "head" else Nothing()
        if kind == "ngram":
            return _ngram(rest.split(",")) if colon else Ngram()
        if kind == "lookahead":
            return _lookahead(rest.split(",")) if colon else Lookahead()
        if kind == "model" and rest:
            return SmallModel(rest)
        if kind == "text" and (rest or not colon):
            return GivenText(rest or None)
    except ValueError as fault:
        raise HeadsmithError(
            f"drafter {text!r} has options that cannot be read; it can be {FORMS}"
        ) from fault
    raise HeadsmithError(f"drafter is {text!r}; it can be {FORMS}")


def _ngram(options: list[str]) -> Ngram:
    if len(options) not in (2, 3):
        raise ValueError
    return Ngram(int(options[0]), int(options[1]), *options[2:])


def _lookahead(options: list[str]) -> Lookahead:
    if len(options) not in (3, 4) or options[3:] not in ([], ["prompt"]):
        raise ValueError
    window, level, guesses = map(int, options[:3])
    return Lookahead(window, level, guesses, from_prompt=len(options) == 4)


def check_draft(choice: Drafting, shape: Draft | None) -> None:
    """HeadsmithError for a draft shape that this drafter cannot fill."""
    from headsmith.inference.tree import Chain, DynamicTree, RankTree

    kinds = {"chain": Chain, "tree": DynamicTree, "static": RankTree}
    if shape is None or isinstance(shape, tuple(kinds[name] for name in choice.shapes)):
        return
    if isinstance(choice, Lookahead):
        raise HeadsmithError(
            f"drafter {choice} drafts its window and its guesses, not {shape}; leave --draft out"
        )
    static = ", or static:FILE" if "static" in choice.shapes else ""
    raise HeadsmithError(
        f"draft {shape} cannot be filled by drafter {choice}; give chain:DEPTH or "
        f"tree:NODES,TOPK,DEPTH{static}"
    )
