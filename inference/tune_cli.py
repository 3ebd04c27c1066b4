"""`headsmith tune`: parse, call `tune`, print."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import click


@click.command("tune")
@click.option("--target", help="Folder, Hub id or GGUF file. [default: the head's own target]")
@click.option("--head", help="Folder of the head's checkpoint, or ORG/NAME.")
@click.option("--drafter", default="head", show_default=True, help="As for headsmith eval.")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    help="A shape to measure, as for headsmith eval; repeat for several. [default: chains of 1, 2, "
    "3, 4 and 6, and two trees]",
)
@click.option("--prompts", default="default", show_default=True, help="As for headsmith eval.")
@click.option("--data-dir", help="Folder that holds TASK.jsonl, instead of the Hub.")
@click.option("--batch", default="1,4,16", show_default=True, help="Batch sizes to serve at.")
@click.option("--context", help="Lengths to bring every prompt to, such as 200,1500.")
@click.option("--arrival", help="all, constant:RATE or poisson:RATE, as for headsmith eval.")
@click.option("--prefill-chunk", type=int, help="Most prompt tokens of a pass. [default: all]")
@click.option("--rule", default="greedy", show_default=True, help="As for headsmith eval.")
@click.option("--temperature", type=float, help="Of sample, ratio and typical. [default: 1]")
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16, float16.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--limit", type=int, help="First N prompts of each source.")
@click.option(
    "--out", help="Folder for a run's folder each, tune.json and its plot; finished runs are kept."
)
@click.option("--json", "json_path", help="Also write the findings here; - is standard output.")
@click.option("--allow-mismatch", is_flag=True, help="Measure a head on a target not its own.")
@click.option("--threads", type=int, help="CPU threads of torch.")
def tune_(
    drafts: tuple[str, ...], batch: str, context: str | None, json_path: str | None, **options: Any
) -> None:
    """Measure draft shapes at the batch sizes that you will serve, and say which one to use.

    Each shape is measured in turn with plain decoding. The answer is a draft for each batch size,
    and the batch size above which speculation should be switched off.
    """
    from rich.console import Console

    from headsmith.errors import EqualityFailed
    from headsmith.files import write_json
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
    if json_path == "-":
        click.echo(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))
    elif json_path is not None:
        write_json(json_path, found)
    wrong = [run["draft"] for run in found["runs"] if run["fails"]]
    if wrong:
        raise EqualityFailed(
            f"with {', '.join(wrong)} output tokens are not the target's own; this is a fault of "
            "the decoder, not of the head"
        )
