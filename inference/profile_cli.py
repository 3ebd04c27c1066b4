"""`headsmith profile`: parse, measure, print."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import click


@click.command("profile")
@click.option("--target", help="Folder, Hub id or GGUF file. [default: the head's own target]")
@click.option("--head", help="Folder of the head's checkpoint, or ORG/NAME.")
@click.option("--draft", default="", show_default="chain:4", help="As for headsmith eval.")
@click.option("--prompts", default="default:8", show_default=True, help="As for headsmith eval.")
@click.option("--data-dir", help="Folder that holds TASK.jsonl, instead of the Hub.")
@click.option("--context", help="Lengths to bring every prompt to, such as 1500.")
@click.option("--batch", default="1", show_default=True, help="Batch sizes, such as 1,4,8.")
@click.option("--rule", default="greedy", show_default=True, help="As for headsmith eval.")
@click.option("--temperature", type=float, help="Of sample, ratio and typical. [default: 1]")
@click.option("--max-new-tokens", type=int, default=48, show_default=True)
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16, float16.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", help="Folder for profile.json.")
@click.option("--json", "json_path", help="Also write the figures here; - is standard output.")
@click.option("--allow-mismatch", is_flag=True, help="Measure a head on a target not its own.")
@click.option("--threads", type=int, help="CPU threads of torch.")
def profile_(batch: str, context: str | None, json_path: str | None, **options: Any) -> None:
    """Show what a round of drafted decoding costs here, and the speedup that any tau gives."""
    from rich.console import Console

    from headsmith.files import write_json
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
    if json_path == "-":
        click.echo(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))
    elif json_path is not None:
        write_json(json_path, found)
