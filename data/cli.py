"""`headsmith data`: prepare conversations, and look at what would be trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headsmith.errors import HeadsmithError

if TYPE_CHECKING:
    from headsmith.data.prepare import Prepared

_DEFAULT_TARGET = "smollm2-135m-instruct"


@click.group()
def data() -> None:
    """Prepare, inspect, regenerate, mix, clean and capture training data."""


def _source_options(command: Any) -> Any:
    for option in (
        click.option(
            "--chat-template",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="A Jinja file to use instead of the tokenizer's own chat template.",
        ),
        click.option("--revision", help="Commit, branch or tag of a Hub data set."),
        click.option("--split", help="Split of a source that has several.  [default: train]"),
        click.option(
            "--target",
            default=_DEFAULT_TARGET,
            show_default=True,
            help="Whose tokenizer and chat template are used: a folder, a Hub id or a GGUF file.",
        ),
    ):
        command = option(command)
    return click.argument("source")(command)


@data.command()
@_source_options
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder to put it in.  [default: cache]"
)
@click.option("--max-length", default=2048, show_default=True, help="Longest row, in tokens.")
@click.option("--max-rows", type=int, help="Stop after so many rows.  [default: all]")
@click.option("--min-trained", default=2, show_default=True, help="Fewest trained tokens of a row.")
@click.option(
    "--overlong",
    type=click.Choice(["cut", "drop"]),
    default="cut",
    show_default=True,
    help="What happens to a conversation longer than --max-length.",
)
@click.option(
    "--held-out",
    default=0.0,
    show_default=True,
    help="Share of conversations to keep out, as prompts to measure on.",
)
def prepare(
    source: str, target: str, out: Path | None, chat_template: Path | None, **limits: Any
) -> None:
    """Tokenise and mask SOURCE (JSON array, JSON Lines, Arrow, Parquet, or a Hub id) once.

    Prints the folder it made, or found, and what became of every conversation.
    """
    from rich.console import Console

    from headsmith.data.prepare import prepare as prepare_data
    from headsmith.files import cache_dir

    tokenizer = load_tokenizer(target, chat_template)
    root = out or cache_dir() / "prepared"
    with _Bar() as bar:
        prepared = prepare_data(source, tokenizer, root, progress=bar.update, **limits)
    _print_counts(Console(stderr=True), prepared)
    click.echo(prepared.path)


@data.command()
@_source_options
@click.option("-n", "--number", default=3, show_default=True, help="How many documents to print.")
@click.option("--color/--no-color", default=None, help="Colours.  [default: on a terminal]")
def inspect(
    source: str,
    target: str,
    chat_template: Path | None,
    number: int,
    color: bool | None,
    split: str | None,
    revision: str | None,
) -> None:
    """Print conversations of SOURCE, or of prepared data, with the trained tokens coloured."""
    from rich.console import Console

    from headsmith.data.show import inspect as inspect_data

    if number < 1:
        raise HeadsmithError(f"--number is {number}; it must be at least 1")
    tokenizer = load_tokenizer(target, chat_template)
    console = Console(
        force_terminal=color, no_color=True if color is False else None, soft_wrap=True
    )
    inspect_data(source, tokenizer, console, limit=number, split=split, revision=revision)


def load_tokenizer(target: str, chat_template: Path | None = None) -> Any:
    """The tokenizer of a target, without its weights; HeadsmithError if there is none."""
    from headsmith.models import loading

    tokenizer = loading.load_tokenizer(target)
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    return tokenizer


def _print_counts(console: Any, prepared: Prepared) -> None:
    from rich.markup import escape
    from rich.table import Table

    info = prepared.info
    for warning in info["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True, highlight=False)
    how = "prepared before from" if prepared.reused else "prepared from"
    console.print(f"{how} {escape(info['origin'])}", soft_wrap=True, highlight=False)
    table = Table()
    table.add_column("conversations")
    table.add_column("count", justify="right")
    table.add_row("read", f"{info['read']:,}")
    table.add_row("used", f"{info['rows']:,}", style="green")
    table.add_row("  of these, cut to fit", f"{info['cut']:,}")
    table.add_row("held out as prompts", f"{info['held_out']:,}")
    for reason, count in prepared.counts.most_common():
        table.add_row(f"left out: {escape(reason)}", f"{count:,}", style="yellow")
    table.add_section()
    table.add_row("tokens", f"{info['tokens']:,}")
    share = info["trained_tokens"] / info["tokens"]
    table.add_row(f"trained tokens ({share:.0%})", f"{info['trained_tokens']:,}")
    console.print(table)


class _Bar:
    """A progress bar on stderr that knows how far the source has been read."""

    def __enter__(self) -> _Bar:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("preparing"),
            BarColumn(),
            TextColumn("{task.fields[rows]:,} rows"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("preparing", total=None, rows=0)
        self._progress.start()
        return self

    def update(self, fraction: float | None, rows: int) -> None:
        total = None if fraction is None else 1.0
        self._progress.update(self._task, total=total, completed=fraction or 0.0, rows=rows)

    def __exit__(self, *exit_info: object) -> None:
        self._progress.stop()
