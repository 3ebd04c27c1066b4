"""`headsmith profile`: parse, measure, print."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import click

from headsmith.inference import options as shared


@click.command("profile")
@shared.target
@shared.head
@click.option("--draft", default="", show_default="chain:4", help="As for headsmith eval.")
@click.option("--prompts", default="default:8", show_default=True, help="As for headsmith eval.")
@shared.data_dir
@click.option("--context", help="Lengths to bring every prompt to, such as 1500.")
@click.option("--batch", default="1", show_default=True, help="Batch sizes, such as 1,4,8.")
@click.option("--rule", default="greedy", show_default=True, help="As for headsmith eval.")
@shared.temperature
@click.option("--max-new-tokens", type=int, default=48, show_default=True)
@shared.dtype
@shared.device
@shared.seed
@click.option("--out", help="Folder for profile.json.")
@shared.json_path
@shared.allow_mismatch
@shared.threads
def profile_(batch: str, context: str | None, json_path: str | None, **options: Any) -> None:
    """Show what a round of drafted decoding costs here, and the speedup that any tau gives."""
    from rich.console import Console

    from headsmith.inference.cli import batch_sizes, context_lengths
    from headsmith.inference.costs import profile
    from headsmith.inference.profile_report import print_profile
    from headsmith.inference.settings import EvalSettings

    settings = EvalSettings(
        batch=batch_sizes(batch),
        context=context_lengths(context),
        command=shlex.join(["headsmith", *sys.argv[1:]]),
        **options,
    )
    found = profile(settings)
    print_profile(found, Console(stderr=json_path == "-"))
    shared.write_figures(found, json_path)
