"""Edits: how many tokens a pass commits when most of the answer is known beforehand.

    python benchmarks/given_text.py --target DIR --prompts mt_bench:20 --data-dir DIR

The target answers every prompt plainly. Its answer, with --change percent of the words edited
(replaced, left out, or one put before), is then the given text of the same prompt, as the file
before an edit is that of the file after it: a target asked for the edit would write what it writes
here. Plain decoding and the drafter of given text take turns. For each percentage: tau with its
interval, tokens/s, speedup, how much of the text is the target's own. Exits with 3 if a token is
not the target's.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from heads import Judge, figure, measuring, show
from rich import box
from rich.table import Table

from headsmith.cli import run
from headsmith.errors import HeadsmithError
from headsmith.files import write_json
from headsmith.inference.drafter_choice import GivenText
from headsmith.inference.engine import Decoder
from headsmith.inference.evaluate import load_target
from headsmith.inference.given_text import GivenTextDrafter
from headsmith.inference.metrics import summarise
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.records import Request, Response
from headsmith.inference.settings import EvalSettings
from headsmith.inference.speed import Arm, alternate, speed_row
from headsmith.inference.tree import Draft, parse_shape
from headsmith.models.target import Target

Row = dict[str, Any]


def edited(text: str, percent: float, chooser: random.Random) -> str:
    """The text with this share of its words, rounded up, replaced by another word of it, left out,
    or with another word before them.
    """
    words = re.findall(r"\s*\S+", text)
    count = min(len(words), -(-len(words) * percent // 100))
    changed = list(words)
    for at in chooser.sample(range(len(words)), int(count)):
        others = [word for word in words if word.strip() != words[at].strip()] or [" other"]
        other = chooser.choice(others)
        changed[at] = chooser.choice(["", other, other + words[at]])
    return "".join(changed)


def edits(
    target: Target, responses: Sequence[Response], percent: float, seed: int
) -> list[Request]:
    """The requests again, each with its own answer, edited, as given text."""
    chooser, found = random.Random(seed), []
    for response in responses:
        text = target.tokenizer.decode(response.output_ids, skip_special_tokens=True)
        given = target.tokenizer(edited(text, percent, chooser), add_special_tokens=False)
        found.append(replace(response.request, given_ids=list(given["input_ids"])))
    return found


def measure(
    target: Target, requests: list[Request], shape: Draft, new_tokens: int, batch: int
) -> tuple[Arm, Arm]:
    """The plain arm and the drafted one, in turn over the requests."""

    def decoder(drafter: GivenTextDrafter | None, limit: int) -> Decoder:
        return Decoder(target, drafter, batch=batch, max_new_tokens=limit)

    for drafter in (None, GivenTextDrafter(GivenText(), shape)):
        decoder(drafter, 8).generate(requests[:batch])
    plain = Arm(decoder(None, new_tokens))
    drafted = Arm(decoder(GivenTextDrafter(GivenText(), shape), new_tokens))
    alternate([plain, drafted], requests, batch)
    return plain, drafted


def row_of(percent: float, drafted: Arm, plain: Arm, judge: Judge, batch: int) -> Row:
    """Everything about one percentage."""
    pairs = zip(drafted.responses, plain.responses, strict=True)
    return {
        "percent": percent,
        "metrics": summarise(drafted.responses),
        "speed": speed_row(drafted, plain, batch=batch, peak_memory_bytes=None, head_bytes=None),
        "equality": judge.judge(drafted.responses),
        "same_as_plain": sum(mine.output_ids == its.output_ids for mine, its in pairs),
    }


def table_of(rows: Sequence[Row]) -> Table:
    """A line for each percentage."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    columns = ("words edited", "tau", "95 %", "tokens/s", "speedup", "same text")
    for column in (*columns, "exact/ties/fails"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        metrics, speed, equality = row["metrics"], row["speed"], row["equality"]
        interval = metrics["tau_ci"]
        table.add_row(
            f"{row['percent']:g} %",
            figure(metrics["tau"]),
            "-" if interval is None else f"{interval[0]:.2f} .. {interval[1]:.2f}",
            figure(speed["tokens_per_s"]),
            figure(speed["speedup"]),
            f"{row['same_as_plain']} of {metrics['requests']}",
            f"{equality['exact']}/{equality['ties']}/{equality['fails']}",
        )
    return table


@click.command()
@click.option("--target", required=True, help="Folder, Hub id or GGUF file.")
@measuring
@click.option("--change", default="0,5,20", show_default=True, help="Percent of the words.")
@click.option("--draft", default="chain:16", show_default=True)
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@click.option("--batch", type=int, default=1, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(change: str, batch: int, json_path: Path | None, **options: Any) -> None:
    """Draft answers from themselves with some of their words edited."""
    try:
        percents = [float(number) for number in change.split(",")]
    except ValueError as fault:
        raise HeadsmithError(f"change {change!r} is not a list such as 0,5,20") from fault
    settings = EvalSettings(drafter="text", batch=(batch,), **options)
    shape, limit = parse_shape(settings.draft), settings.max_new_tokens
    target = load_target(settings)
    builder = RequestBuilder(target.tokenizer, target.max_context)
    conversations = load_prompts(settings.prompts, data_dir=settings.data_dir)
    asked = [builder.build(one) for one in conversations]
    answered, _ = Decoder(target, batch=batch, max_new_tokens=limit).generate(asked)
    rows, judge = [], Judge(target)
    for percent in percents:
        requests = edits(target, answered, percent, settings.seed)
        plain, drafted = measure(target, requests, shape, limit, batch)
        rows.append(row_of(percent, drafted, plain, judge, batch))
    if json_path is not None:
        write_json(json_path, {"draft": settings.draft, "rows": rows})
    show(table_of(rows), [], rows)


if __name__ == "__main__":
    sys.exit(run(main, name="given_text.py"))
