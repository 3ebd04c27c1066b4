"""Conversations on the screen, with the tokens that are trained in colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from rich.console import Console
from rich.text import Text

from headsmith.data.mask import Encoded, Masker
from headsmith.data.prepare import load_prepared
from headsmith.data.read import Message, read_conversations
from headsmith.data.template import TemplateRefused
from headsmith.data.token_rows import TokenRow
from headsmith.errors import HeadsmithError

TRAINED = "bold green"
NOT_TRAINED = "dim"
# Where there are no colours, the trained tokens stand in these instead.
BRACKETS = ("\u27e6", "\u27e7")


def inspect(
    source: str,
    tokenizer: Any,
    console: Console,
    *,
    limit: int = 3,
    split: str | None = None,
    revision: str | None = None,
) -> int:
    """Print up to `limit` documents of a source or of prepared data, each with its totals.

    Returns the number of documents printed; raises HeadsmithError if there is none.
    """
    colours = console.color_system is not None and not console.no_color
    shown = 0
    for document in islice(_documents(source, tokenizer, console, split, revision), limit):
        console.print(coloured(tokenizer, document, colours))
        console.print(totals(shown, document), style="cyan", highlight=False)
        shown += 1
    if not shown and limit > 0:
        raise HeadsmithError(f"{source} holds no conversation that can be shown")
    return shown


def coloured(tokenizer: Any, document: Encoded, colours: bool = True) -> Text:
    """The document's text; trained tokens are green, or in double brackets without `colours`."""
    text = Text()
    place = 0
    for trained, run in groupby(document.mask, key=bool):
        length = len(list(run))
        piece = tokenizer.decode(
            document.ids[place : place + length],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        if trained and not colours:
            piece = f"{BRACKETS[0]}{piece}{BRACKETS[1]}"
        text.append(piece, style=TRAINED if trained else NOT_TRAINED)
        place += length
    return text


def totals(index: int, document: Encoded) -> str:
    """One line: tokens, trained tokens, answers."""
    trained = sum(map(bool, document.mask))
    answers = sum(1 for is_trained, _ in groupby(document.mask, key=bool) if is_trained)
    share = trained / max(len(document.ids), 1)
    return (
        f"-- document {index}: {len(document.ids)} tokens, {trained} trained ({share:.0%}), "
        f"{answers} {'answer' if answers == 1 else 'answers'}"
    )


def _documents(
    source: str, tokenizer: Any, console: Console, split: str | None, revision: str | None
) -> Iterator[Encoded]:
    if prepared := load_prepared(source):
        return _rows(prepared.dataset, len(tokenizer))
    conversations = read_conversations(source, split=split, revision=revision)
    return _encoded(conversations.rows(len(tokenizer)), tokenizer, console)


def _rows(dataset: Any, vocab_size: int) -> Iterator[Encoded]:
    for row in dataset:
        ids: Sequence[int] = row["input_ids"].tolist()
        if max(ids) >= vocab_size:
            raise HeadsmithError(
                f"the prepared data hold token id {max(ids)}, but the target's tokenizer has "
                f"{vocab_size}; inspect them with the target they were prepared for"
            )
        yield Encoded(list(ids), row["loss_mask"].tolist())


def _encoded(
    rows: Iterable[list[Message] | TokenRow], tokenizer: Any, console: Console
) -> Iterator[Encoded]:
    masker = Masker(tokenizer)
    for row in rows:
        if isinstance(row, TokenRow):
            yield Encoded(row.ids.tolist(), row.mask.tolist())
            continue
        try:
            yield masker.encode(row)
        except TemplateRefused as refusal:
            console.print(f"-- left out: {refusal}", style="yellow", highlight=False)
