"""`headsmith eval`: parse, call `evaluate`, print. Heavy imports happen inside the command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from headsmith.errors import HeadsmithError
from headsmith.inference import options as shared

Progress = Callable[[int, int, str], None]


def batch_sizes(text: str) -> tuple[int, ...]:
    """`1,4,8` as numbers; HeadsmithError for anything else."""
    return _numbers(text, f"batch {text!r} is not a list of batch sizes such as 1,4,8")


def context_lengths(text: str | None) -> tuple[int, ...]:
    """`200,1500` as numbers, nothing as none; HeadsmithError for anything else."""
    what = f"context {text!r} is not a list of lengths in tokens such as 200,1500"
    return () if text is None else _numbers(text, what)


def _numbers(text: str, otherwise: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as fault:
        raise HeadsmithError(otherwise) from fault


@click.command("eval")
@shared.target
@shared.head
@click.option(
    "--prompts",
    default="default",
    show_default=True,
    help="JSONL file or task (default, mt_bench, humaneval, gsm8k), each with :N for the first N; "
    "several with commas.",
)
@shared.data_dir
@click.option(
    "--draft",
    default="",
    show_default="chain:4",
    help="chain:DEPTH, tree:NODES,TOPK,DEPTH, or static:FILE, a JSON list of rank paths; for "
    "Medusa heads chain:DEPTH, static:FILE, or stored or medusa:NODES for the tree that headsmith "
    "calibrate made; for rule ratio also branches:WIDTH,WIDTH,...",
)
@click.option(
    "--drafter",
    default="head",
    show_default=True,
    help="head; none (plain decoding); ngram[:MIN,MAX[,PICK]], n-gram lookup in prompt and answer, "
    "PICK longest, recent or first; lookahead[:WINDOW,LEVEL,GUESSES[,prompt]], which has no "
    "--draft; model:PATH, a small model with the same tokens; text[:FILE], the expected answer, "
    "without FILE that of each prompt's row (`given`).",
)
@click.option(
    "--rule",
    default="greedy",
    show_default=True,
    help="greedy; sample (lossless too: the text is that of plain sampling); ratio (lossless in "
    "distribution: drafts drawn from the head); typical (lossy).",
)
@shared.temperature
@click.option("--top-k", type=int, help="Draw from the K likeliest tokens only.")
@click.option("--top-p", type=float, help="Draw from the fewest tokens that have P together.")
@click.option("--min-p", type=float, help="Leave out what is below P times the likeliest.")
@click.option("--repetition-penalty", type=float, help="On tokens of prompt and output; 1 is off.")
@click.option("--presence-penalty", type=float, help="On tokens of the output; 0 is off.")
@click.option("--frequency-penalty", type=float, help="The same for each time; 0 is off.")
@click.option("--logit-bias", multiple=True, help="ID=VALUE, added to a logit; repeat for several.")
@click.option("--posterior-threshold", type=float, help="Of typical. [default: 0.09]")
@click.option("--posterior-alpha", type=float, help="Of typical. [default: sqrt(threshold)]")
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@click.option("--batch", default="1", show_default=True, help="Batch sizes, such as 1,4,8.")
@shared.dtype
@shared.device
@click.option(
    "--baseline/--no-baseline",
    default=True,
    show_default=True,
    help="Measure plain decoding in turn with the drafted one.",
)
@click.option(
    "--arrival",
    help="Measure a queue: all (at once), constant:RATE or poisson:RATE, in requests a second; "
    "--batch is the limit of concurrent ones.",
)
@shared.prefill_chunk
@shared.seed
@click.option("--system-prompt", help="Put before prompts that have no system message.")
@click.option("--stop", multiple=True, help="A text that ends an answer; repeat for several.")
@shared.limit
@click.option(
    "--out",
    help="Folder for result.json, steps.jsonl, responses.jsonl and the report; a run that was "
    "interrupted goes on from what is there.",
)
@click.option("--gate", help="YAML file of bounds; exit code 1 when one is missed.")
@click.option(
    "--metrics-port",
    type=int,
    help="Serve Prometheus counters of the run here, on all interfaces, under vLLM's names.",
)
@shared.json_path
@shared.allow_mismatch
@shared.threads
@click.option(
    "--context",
    help="Bring every prompt to this many tokens, such as 200,1500, with texts of the other "
    "prompts before it; each length is measured as tasks of its own.",
)
@click.option("--diagnose", help="drift: what the head reads at each depth of its own drafts.")
@click.option(
    "--diagnose-depth", type=int, default=8, show_default=True, help="Depth of those chains."
)
def eval_(batch: str, context: str | None, json_path: str | None, **options: Any) -> None:
    """Measure a head: acceptance length, rates, speed and equality with the target."""
    from rich.console import Console

    from headsmith.inference import plots
    from headsmith.inference.diagnose_report import print_diagnosis
    from headsmith.inference.evaluate import EvalSettings, evaluate, raise_if_unequal
    from headsmith.inference.gate import raise_if_missed
    from headsmith.inference.report import print_report
    from headsmith.inference.resume import saying_what_is_kept

    command = shlex.join(["headsmith", *sys.argv[1:]])
    settings = EvalSettings(
        batch=batch_sizes(batch), context=context_lengths(context), command=command, **options
    )
    with saying_what_is_kept(settings.out), progress_bar() as on_progress:
        result = evaluate(settings, on_progress)
    console = Console(stderr=json_path == "-")
    print_report(result, console)
    if "diagnosis" in result:
        print_diagnosis(result["diagnosis"], console)
    if settings.out is not None and not plots.can_plot():
        click.echo(f"headsmith: {plots.NO_PLOT}", err=True)
    shared.write_figures(result, json_path)
    raise_if_unequal(result)
    raise_if_missed(result)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr with an ETA; it says what is loading until the first request is done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("loading", total=None)

        def show(done: int, total: int, label: str) -> None:
            what = "checking equality" if done == total else f"measuring, {label}"
            bar.update(task, completed=done, total=total, description=what)

        yield show
