"""What drafting costs and gives: what needs no training beside trained heads, in one table.

    python benchmarks/drafters.py eagle3=outputs/a/best medusa=outputs/m/best \
        --target DIR --prompts mt_bench:20,humaneval:20,gsm8k:20 --data-dir DIR

Nothing, n-gram lookup, Lookahead decoding, a small model and every head NAME=DIR take turns over
the first turns of the same prompts, at every temperature of --temperature (0 is rule greedy, above
it is rule sample).
`cut:N` of --drafter is the target's first N blocks under its own output head, made here; every
other --drafter is as in headsmith eval. All draft in the --draft shape but Lookahead, which is its
own, and Medusa heads, which answer `tree:N,K,D` with `medusa:N`.

The table has tau with its interval, tau of each task, `hit`, the share of passes in which anything
was drafted, tokens/s, the speedup over nothing, and how much of the text is the target's own;
--json keeps everything. Exits with 3 if a token is not the target's.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from heads import Judge, draft_of, figure, measuring, named, show
from rich import box
from rich.table import Table

from headsmith.cli import run
from headsmith.errors import HeadsmithError
from headsmith.files import write_json
from headsmith.inference.drafter_choice import Lookahead, parse_drafter
from headsmith.inference.evaluate import load_matching_head, load_target
from headsmith.inference.measure import Session
from headsmith.inference.metrics import by_task, summarise
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.records import Request
from headsmith.inference.settings import EvalSettings
from headsmith.inference.speed import Arm, alternate, speed_row
from headsmith.models.heads import Head
from headsmith.models.loading import find_blocks, load_model

Row = dict[str, Any]


def cut(target: str, layers: int, out: Path) -> Path:
    """The target's first `layers` blocks, with its norm and output head, as a model's folder."""
    model, tokenizer = load_model(target, None, torch.float32)
    config = model.config.get_text_config()
    if not 1 <= layers < config.num_hidden_layers:
        raise HeadsmithError(
            f"cut:{layers} is no part of a target of {config.num_hidden_layers} blocks; name fewer"
        )
    del find_blocks(model.get_decoder(), config.num_hidden_layers)[layers:]
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def drafter_of(text: str, target: str, folder: Path) -> str:
    """`--drafter` of headsmith eval; a cut is made in `folder` first."""
    kind, _, count = text.partition(":")
    if kind != "cut":
        return text
    if not count.isdigit():
        raise HeadsmithError(f"{text!r} is not of the form cut:N, such as cut:4")
    return f"model:{cut(target, int(count), folder / f'cut{count}')}"


def headless(
    base: EvalSettings, drafters: Sequence[str], draft: str, folder: Path
) -> dict[str, EvalSettings]:
    """The settings of what drafts without a head."""
    assert base.target is not None
    found = {}
    for text in drafters:
        choice = drafter_of(text, base.target, folder)
        own = isinstance(parse_drafter(choice), Lookahead)
        found[text] = replace(base, drafter=choice, draft="" if own else draft)
    return found


def temperatures(text: str) -> list[float]:
    """`0,1` as numbers."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as fault:
        raise HeadsmithError(f"temperature {text!r} is not a list such as 0,1") from fault


def at(settings: EvalSettings, temperature: float) -> EvalSettings:
    """The settings with the rule that a temperature means."""
    rule = "sample" if temperature else "greedy"
    return replace(settings, rule=rule, temperature=temperature or None)


def measure(
    sessions: dict[str, Session], requests: list[Request], batch: int
) -> tuple[Arm, dict[str, Arm]]:
    """The plain arm and one for every drafter, in turn over the requests."""
    first = next(iter(sessions.values()))
    plain = Arm(first.decoder(batch, plain=True))
    arms = {name: Arm(one.decoder(batch, plain=False)) for name, one in sessions.items()}
    for session in sessions.values():
        session.decoder(batch, plain=False, max_new_tokens=8).generate(requests[:batch])
    first.decoder(batch, plain=True, max_new_tokens=8).generate(requests[:batch])
    alternate([plain, *arms.values()], requests, batch)
    return plain, arms


def row_of(name: str, settings: EvalSettings, arm: Arm, plain: Arm, judge: Judge) -> Row:
    """Everything about one drafter at one temperature."""
    passes = [one for response in arm.responses for one in response.passes]
    pairs = zip(arm.responses, plain.responses, strict=True)
    batch = settings.batch[0]
    return {
        "temperature": settings.used_temperature,
        "name": name,
        "drafter": settings.drafter if arm is not plain else "none",
        "draft": settings.draft if arm is not plain else "",
        "metrics": summarise(arm.responses),
        "tasks": by_task(arm.responses),
        "hit": sum(one.nodes > 0 for one in passes) / len(passes) if passes else None,
        "speed": speed_row(arm, plain, batch=batch, peak_memory_bytes=None, head_bytes=None),
        "equality": judge.judge(arm.responses),
        "same_as_plain": sum(mine.output_ids == its.output_ids for mine, its in pairs),
    }


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as a table, a section for each temperature."""
    tasks = list(rows[0]["tasks"])
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    columns = ["temp.", "drafter", "draft", "tau", "95 %", *(f"tau {task}" for task in tasks)]
    columns += ["hit", "tokens/s", "speedup", "same text", "exact/ties/fails"]
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number > 2 else "left", no_wrap=True)
    before = None
    for row in rows:
        if before not in (None, row["temperature"]):
            table.add_section()
        table.add_row(
            "" if before == row["temperature"] else f"{row['temperature']:g}", *cells(row, tasks)
        )
        before = row["temperature"]
    return table


def cells(row: Row, tasks: Sequence[str]) -> Iterator[str]:
    """What a row says, behind its temperature."""
    metrics, equality, interval = row["metrics"], row["equality"], row["metrics"]["tau_ci"]
    yield row["name"]
    yield row["draft"]
    yield figure(metrics["tau"])
    yield "-" if interval is None else f"{interval[0]:.2f} .. {interval[1]:.2f}"
    yield from (figure(row["tasks"][task]["tau"]) for task in tasks)
    yield "-" if row["hit"] is None else f"{100 * row['hit']:.0f} %"
    yield figure(row["speed"]["tokens_per_s"])
    yield figure(row["speed"]["speedup"])
    yield f"{row['same_as_plain']} of {metrics['requests']}"
    yield f"{equality['exact']}/{equality['ties']}/{equality['fails']}"


@click.command()
@click.argument("heads", nargs=-1, metavar="[NAME=DIR]...")
@click.option("--target", required=True, help="Folder, Hub id or GGUF file.")
@click.option("--drafter", "drafters", multiple=True, default=("ngram", "lookahead", "cut:4"))
@measuring
@click.option("--draft", default="chain:4", show_default=True)
@click.option("--temperature", default="0,1", show_default=True, help="Such as 0 or 0,0.7,1.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
@click.option("--batch", type=int, default=1, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(
    heads: tuple[str, ...],
    drafters: tuple[str, ...],
    draft: str,
    temperature: str,
    batch: int,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Compare drafters that cost no training with each other and with HEADS, each NAME=DIR."""
    steps = temperatures(temperature)
    base = EvalSettings(drafter="none", batch=(batch,), **options)
    target = load_target(base)
    conversations = load_prompts(base.prompts, data_dir=base.data_dir)
    builder = RequestBuilder(target.tokenizer, target.max_context)
    wave = [builder.build(one) for one in conversations]
    warnings = list(builder.warnings)
    loaded: dict[str, Head] = {}
    settings: dict[str, EvalSettings] = {}
    for name, path in named(heads).items():
        one = replace(base, drafter="head", head=path, draft=draft)
        loaded[name], more = load_matching_head(one, target)
        settings[name] = replace(one, draft=draft_of(loaded[name], draft))
        warnings += more
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = headless(base, drafters, draft, Path(folder)) | settings
        for degrees in steps:
            sessions = {
                name: Session(at(one, degrees), target, loaded.get(name), conversations, builder)
                for name, one in settings.items()
            }
            click.echo(f"{len(wave)} prompts at {degrees:g}, {len(sessions) + 1} arms", err=True)
            plain, arms = measure(sessions, wave, batch)
            judge = Judge(target, at(base, degrees).make_rule())
            rows.append(row_of("nothing", at(base, degrees), plain, plain, judge))
            rows += [
                row_of(name, sessions[name].settings, arm, plain, judge)
                for name, arm in arms.items()
            ]
    if json_path is not None:
        write_json(json_path, {"rows": rows, "warnings": warnings})
    show(table_of(rows), [f"warning: {text}" for text in warnings], rows)


if __name__ == "__main__":
    sys.exit(run(main, name="drafters.py"))
