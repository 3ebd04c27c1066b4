"""`headsmith data regenerate`: the target answers prompts, to train on its own text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("prompts")
@click.option("--target", default="smollm2-135m-instruct", show_default=True, help="Who answers.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSONL to write."
)
@click.option("--max-new-tokens", default=256, show_default=True, help="Longest answer, in tokens.")
@click.option("--batch", default=16, show_default=True, help="Conversations answered at a time.")
@click.option("--limit", type=int, help="First N prompts.  [default: all]")
def regenerate(prompts: str, target: str, out: Path, **limits: Any) -> None:
    """Let the target answer PROMPTS (JSONL with prompt, messages or turns, or a task), greedily.

    Every turn is answered. Started again, it goes on where it was.
    """
    from rich.console import Console

    from headsmith.inference.cli import progress_bar
    from headsmith.inference.regenerate import regenerate as answer
    from headsmith.models.target import Target

    loaded = Target.load(target)
    with progress_bar() as show:

        def answered(done: int, total: int) -> None:
            show(done, total, "answering")

        counts = answer(loaded, prompts, out, progress=answered, **limits)
    said = ", ".join(f"{number} {what}" for what, number in counts.items())
    Console(stderr=True).print(f"{out}: {said}", soft_wrap=True, highlight=False)
