"""`headsmith tune`: parse, call `tune`, print."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import click

from headsmith.inference import options as shared


@click.command("tune")
@shared.target
@shared.head
@click.option("--drafter", default="head", show_default=True, help="As for headsmith eval.")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    help="A shape to measure, as for headsmith eval; repeat for several. [default: chains of 1, 2, "
    "3, 4 and 6, and two trees]",
)
@click.option("--prompts", default="default", show_default=True, help="As for headsmith eval.")
@shared.data_dir
@click.option("--batch", default="1,4,16", show_default=True, help="Batch sizes to serve at.")
@click.option("--context", help="Lengths to bring every prompt to, such as 200,1500.")
@click.option("--arrival", help="all, constant:RATE or poisson:RATE, as for headsmith eval.")
@shared.prefill_chunk
@click.option("--rule", default="greedy", show_default=True, help="As for headsmith eval.")
@shared.temperature
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@shared.dtype
@shared.device
@shared.seed
@shared.limit
@click.option(
    "--out", help="Folder for a run's folder each, tune.json and its plot; finished runs are kept."
)
@shared.json_path
@shared.allow_mismatch
@shared.threads
def tune_(
    drafts: tuple[str, ...], batch: str, context: str | None, json_path: str | None, **options: Any
) -> None:
    """Measure draft shapes at the batch sizes that you will serve, and say which one to use.

    Each shape is measured in turn with plain decoding. The answer is a draft for each batch size,
    and the batch size above which speculation should be switched off.
    """
    from rich.console import Console

    from headsmith.errors import EqualityFailed
    from headsmith.inference.cli import batch_sizes, context_lengths, progress_bar
    from headsmith.inference.evaluate import EvalSettings
    from headsmith.inference.tune import tune
    from headsmith.inference.tune_report import print_tune

    settings = EvalSettings(
        batch=batch_sizes(batch),
        context=context_lengths(context),
        command=shlex.join(["headsmith", *sys.argv[1:]]),
        **options,
    )
    with progress_bar() as on_progress:
        found = tune(settings, drafts, on_progress)
    print_tune(found, Console(stderr=json_path == "-"))
    shared.write_figures(found, json_path)
    wrong = [run["draft"] for run in found["runs"] if run["fails"]]
    if wrong:
        raise EqualityFailed(
            f"with {', '.join(wrong)} output tokens are not the target's own; this is a fault of "
            "the decoder, not of the head"
        )
