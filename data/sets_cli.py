"""`headsmith data mix`, `dedup` and `overlap`: files of conversations in, one file out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from headsmith.data.chats import Chats

_SOURCES = click.argument("sources", nargs=-1, required=True)
_OUT = click.Path(dir_okay=False, path_type=Path)
_SPLIT = click.option("--split", help="Split of a source that has several.  [default: train]")
_REVISION = click.option("--revision", help="Commit, branch or tag of a Hub data set.")


@click.command()
@_SOURCES
@click.option("--out", type=_OUT, required=True, help="JSONL to write.")
@click.option(
    "--rows", type=int, help="Rows of the mixture.  [default: all that the weights allow]"
)
@click.option("--repeat", is_flag=True, help="Let rows of a source that is too small come again.")
@click.option("--seed", default=0, show_default=True, help="Picks and shuffles the rows.")
@_SPLIT
@_REVISION
def mix(
    sources: tuple[str, ...],
    out: Path,
    rows: int | None,
    repeat: bool,
    seed: int,
    split: str | None,
    revision: str | None,
) -> None:
    """Mix SOURCES, each with its share behind it, as in chats.jsonl=2 code.jsonl=1.

    Without shares all rows are taken. Rows are picked and shuffled by the seed.
    """
    from headsmith.data.chats import Chats
    from headsmith.data.mix import mix as mix_sources
    from headsmith.data.mix import parse_sources

    names, weights = parse_sources(sources)
    chats = Chats(names, split, revision)
    with _counter() as progress:
        mixed = mix_sources(
            *(names, out, weights),
            rows=rows,
            repeat=repeat,
            seed=seed,
            chats=chats,
            progress=progress,
        )
    total = mixed.written.total()
    _say(f"{out}: {total} rows")
    for name in names:
        share = mixed.written[name] / total
        again = f", {mixed.repeated[name]} of them again" if mixed.repeated[name] else ""
        _say(f"  {name}: {mixed.written[name]} of {mixed.read[name]} rows ({share:.1%}){again}")
    _say_unread(chats)


@click.command()
@_SOURCES
@click.option("--out", type=_OUT, required=True, help="JSONL to write.")
@click.option(
    "--near",
    type=float,
    default=0.8,
    show_default=True,
    help="Rows that share so much of their word 3-grams (Jaccard) are the same.",
)
@click.option("--exact", is_flag=True, help="Only rows of the same words are the same.")
@click.option(
    "--by",
    type=click.Choice(["conversation", "prompt"]),
    default="conversation",
    show_default=True,
    help="What is compared: all that is said, or what the user says.",
)
@_SPLIT
@_REVISION
def dedup(
    sources: tuple[str, ...],
    out: Path,
    near: float,
    exact: bool,
    by: Any,
    split: str | None,
    revision: str | None,
) -> None:
    """Write the rows of SOURCES without duplicates, near ones included; the first one stays."""
    from headsmith.data.chats import Chats
    from headsmith.data.dedup import dedup as dedup_sources

    chats = Chats(sources, split, revision)
    with _counter() as progress:
        found = dedup_sources(
            *(sources, out), near=None if exact else near, by=by, chats=chats, progress=progress
        )
    _say(f"{out}: {found.kept} of {found.read} rows")
    for kind, count in found.left_out.items():
        _say(f"left out, {kind} duplicate: {count}")
    for example in found.examples:
        _say(f"  {example.dropped} is {example.alike:.0%} {example.kept}")
    _say_unread(chats)


@click.command()
@_SOURCES
@click.option(
    "--against",
    multiple=True,
    help="Prompts, as any source; repeat for several. Those that headsmith ships are always looked "
    "for.",
)
@click.option("--ngram", default=8, show_default=True, help="So many words in a row are overlap.")
@click.option("--out", type=_OUT, help="JSONL for the rows without overlap.  [default: none]")
@_SPLIT
@_REVISION
def overlap(
    sources: tuple[str, ...],
    against: tuple[str, ...],
    ngram: int,
    out: Path | None,
    split: str | None,
    revision: str | None,
) -> None:
    """Find rows of SOURCES that hold evaluation prompts, and with --out write the others."""
    from headsmith.data.chats import SHIPPED, Chats
    from headsmith.data.overlap import overlap as find_overlap

    chats = Chats(sources, split, revision)
    prompts = list(dict.fromkeys((SHIPPED, *against)))
    with _counter() as progress:
        found = find_overlap(sources, prompts, out, ngram=ngram, chats=chats, progress=progress)
    where = f"; the other {found.read - found.overlapping} are in {out}" if out else ""
    _say(f"{found.overlapping} of {found.read} rows overlap one of {found.prompts} prompts{where}")
    if found.too_short:
        _say(f"not looked for, too short: {found.too_short} prompts")
    for name, count in found.by_prompts.most_common():
        _say(f"  prompts of {name}: {count} rows")
    for name, count in found.by_prompt.most_common(5):
        _say(f"  prompt {name}: {count} rows")
    for example in found.examples:
        _say(f'  {example.row} and {example.prompt}: "{example.shared}"')
    _say_unread(chats)


def _say(line: str) -> None:
    click.echo(line, err=True)


def _say_unread(chats: Chats) -> None:
    """Rows that could not be read, by reason, and what else there is to know of the sources."""
    for reason, count in chats.skipped.most_common():
        _say(f"not read, {reason}: {count}")
    for warning in chats.warnings:
        _say(f"warning: {warning}")


@contextmanager
def _counter() -> Iterator[Callable[[int], None]]:
    """Rows read so far, on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("reading"), TextColumn("{task.completed:,.0f} rows"))
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda rows: bar.update(task, completed=rows)
