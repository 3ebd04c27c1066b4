"""Options of the command line that several commands have, each in one wording. Imports no torch."""

from __future__ import annotations

import json
from typing import Any

import click

target = click.option(
    "--target", help="Folder, Hub id or GGUF file. [default: the head's own target]"
)
head = click.option("--head", help="Folder of the head's checkpoint, or ORG/NAME.")
data_dir = click.option("--data-dir", help="Folder that holds TASK.jsonl, instead of the Hub.")
temperature = click.option(
    "--temperature", type=float, help="Of sample, ratio and typical. [default: 1]"
)
prefill_chunk = click.option(
    "--prefill-chunk", type=int, help="Most prompt tokens of a pass. [default: all]"
)
dtype = click.option(
    "--dtype", default="float32", show_default=True, help="float32, bfloat16, float16."
)
device = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1."
)
seed = click.option("--seed", type=int, default=0, show_default=True)
limit = click.option("--limit", type=int, help="First N prompts of each source.")
allow_mismatch = click.option(
    "--allow-mismatch", is_flag=True, help="Measure a head on a target not its own."
)
threads = click.option("--threads", type=int, help="CPU threads of torch.")
json_path = click.option(
    "--json", "json_path", help="Also write the figures here; - is standard output."
)


def write_figures(figures: dict[str, Any], path: str | None) -> None:
    """What `--json` asks for."""
    from headsmith.files import write_json

    if path == "-":
        click.echo(json.dumps(figures, indent=2, ensure_ascii=False, allow_nan=False))
    elif path is not None:
        write_json(path, figures)
