"""Several heads of one target beside each other: chain and tree, short and long context.

    python benchmarks/heads.py eagle3=outputs/a/best eagle3.1=outputs/b/best --prompts default:20

Greedy. For each context, plain decoding and every head with every draft take turns over the same
prompts (`headsmith.inference.speed.alternate`), so one baseline serves all and a slow minute of the
machine hits all. Prompts are brought to each --context as `headsmith eval --context` does it.
Medusa heads, whose trees are fixed, answer `tree:N,K,D` with the best N nodes of their calibration
(`medusa:N`). The table has tau with its interval, u_1, u_2, ..., the speedup, and how much of the
text is the target's own; --json keeps everything. Exits with 3 if a token is not the target's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from headsmith.cli import run
from headsmith.errors import EqualityFailed, HeadsmithError
from headsmith.files import write_json
from headsmith.inference.accept import GREEDY, Rule
from headsmith.inference.cli import context_lengths
from headsmith.inference.context import bring_to, context_of
from headsmith.inference.equality import Equality, check_equality
from headsmith.inference.evaluate import load_matching_head, load_target
from headsmith.inference.measure import Session
from headsmith.inference.metrics import summarise
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.records import Request, Response
from headsmith.inference.report import TAU_FORMULA
from headsmith.inference.settings import EvalSettings
from headsmith.inference.speed import Arm, alternate, speed_row
from headsmith.models.heads import Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target

Row = dict[str, Any]


def named(heads: Sequence[str]) -> dict[str, str]:
    """`NAME=DIR ...` as a mapping."""
    pairs = [head.partition("=") for head in heads]
    for head, (name, equals, folder) in zip(heads, pairs, strict=True):
        if not (name and equals and folder):
            raise HeadsmithError(f"{head!r} is not of the form NAME=DIR, such as eagle3=out/best")
    found = {name: folder for name, _, folder in pairs}
    if len(found) < len(pairs):
        raise HeadsmithError("two heads have the same name; give each its own")
    return found


def measure(
    sessions: dict[tuple[str, str], Session], requests: list[Request], batch: int
) -> tuple[Arm, dict[tuple[str, str], Arm]]:
    """The plain arm and one for every (head, draft), in turn over the requests."""
    first = next(iter(sessions.values()))
    plain = Arm(first.decoder(batch, plain=True))
    arms = {key: Arm(one.decoder(batch, plain=False)) for key, one in sessions.items()}
    for session in sessions.values():
        session.decoder(batch, plain=False, max_new_tokens=8).generate(requests[:batch])
    first.decoder(batch, plain=True, max_new_tokens=8).generate(requests[:batch])
    alternate([plain, *arms.values()], requests, batch)
    return plain, arms


def draft_of(head: Head, draft: str) -> str:
    """How this head drafts what was asked for: a Medusa head has no dynamic trees."""
    if draft.startswith("tree:") and isinstance(head, MedusaHead):
        return f"medusa:{draft.removeprefix('tree:').split(',')[0]}"
    return draft


class Judge:
    """The margin check (`check_equality`), once for each distinct output: most arms agree."""

    def __init__(self, target: Target, rule: Rule = GREEDY) -> None:
        self.target, self.rule = target, rule
        self.known: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Equality] = {}

    def judge(self, responses: Sequence[Response]) -> Row:
        """Counts over all tokens of the responses."""
        total = Equality()
        for one in responses:
            key = one.request.name, tuple(one.request.prompt_ids), tuple(one.output_ids)
            if key not in self.known:
                self.known[key] = check_equality(self.target, [one], rule=self.rule)
            found = self.known[key]
            for count in ("checked", "exact", "ties", "fails"):
                setattr(total, count, getattr(total, count) + getattr(found, count))
            total.first_divergence = total.first_divergence or found.first_divergence
        return asdict(total)


def row_of(context: int, key: tuple[str, str], arm: Arm, plain: Arm, judge: Judge) -> Row:
    """Everything about one head with one draft in one context."""
    pairs = zip(arm.responses, plain.responses, strict=True)
    speed = speed_row(arm, plain, batch=1, peak_memory_bytes=None, head_bytes=None)
    return {
        "context": context,
        "head": key[0],
        "draft": key[1],
        "metrics": summarise(arm.responses),
        "speed": speed,
        "equality": judge.judge(arm.responses),
        "same_as_plain": sum(mine.output_ids == its.output_ids for mine, its in pairs),
    }


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as a table, a section for each context and draft."""
    depth = max(len(row["metrics"]["per_position"]) for row in rows)
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    columns = ["context", "draft", "head", "tau", "95 %", *(f"u{i + 1}" for i in range(depth))]
    for number, column in enumerate([*columns, "speedup", "same text", "exact/ties/fails"]):
        table.add_column(column, justify="right" if number > 2 else "left", no_wrap=True)
    before = None
    for row in rows:
        metrics, equality, group = row["metrics"], row["equality"], (row["context"], row["draft"])
        if before not in (None, group):
            table.add_section()
        low_high = metrics["tau_ci"]
        rates = [f"{u:.3f}" for u in metrics["per_position"]]
        table.add_row(
            *("", "") if group == before else (str(group[0]), group[1]),
            row["head"],
            figure(metrics["tau"]),
            "-" if low_high is None else f"{low_high[0]:.2f} .. {low_high[1]:.2f}",
            *rates,
            *["-"] * (depth - len(rates)),
            figure(row["speed"]["speedup"]),
            f"{row['same_as_plain']} of {metrics['requests']}",
            f"{equality['exact']}/{equality['ties']}/{equality['fails']}",
        )
        before = group
    return table


def leaders(rows: Sequence[Row]) -> list[str]:
    """Who leads in tau and in speedup, and by how much, for each context and draft."""
    lines = []
    for context, draft in dict.fromkeys((row["context"], row["draft"]) for row in rows):
        group = [r for r in rows if (r["context"], r["draft"]) == (context, draft)]
        for what, section, key in (("tau", "metrics", "tau"), ("speedup", "speed", "speedup")):
            known = [(r[section][key], r["head"]) for r in group if r[section][key] is not None]
            order = sorted(known, reverse=True)
            if len(order) > 1:
                (best, name), (second, other) = order[:2]
                lines.append(
                    f"{context} tokens, {draft}: {name} leads in {what}, {best:.3f}, which is "
                    f"{best - second:.3f} ({best / second - 1:.1%}) more than {other}"
                )
    return lines


def figure(value: float | None) -> str:
    """Three decimals, or a dash where there is no value."""
    return "-" if value is None else f"{value:.3f}"


def measuring(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every comparison of decoders here has."""
    options = (
        click.option(
            "--prompts", default="default", show_default=True, help="As in headsmith eval."
        ),
        click.option("--data-dir", help="As in headsmith eval."),
        click.option("--dtype", default="float32", show_default=True),
        click.option("--device", default="auto", show_default=True),
        click.option("--threads", type=int, help="CPU threads of torch."),
        click.option("--json", "json_path", type=Path, help="Write everything here."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def show(table: Table, lines: Iterable[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print the table and what is to be said of it; EqualityFailed if a token of `rows` is not the
    target's.
    """
    # As wide as the table, also where the output goes to a file.
    width = Console(width=1000).measure(table).maximum
    console = Console(width=max(width, Console().width), highlight=False)
    console.print(table)
    for line in (TAU_FORMULA, *lines):
        console.print(line, markup=False, soft_wrap=True)
    fails = sum(row["equality"]["fails"] for row in rows)
    if fails:
        raise EqualityFailed(f"{fails} output tokens are not the target's own; see the table")


@click.command()
@click.argument("heads", nargs=-1, required=True, metavar="NAME=DIR...")
@click.option("--target", help="Folder, Hub id or GGUF file. [default: the first head's own]")
@measuring
@click.option("--draft", "drafts", multiple=True, default=("chain:5", "tree:24,4,5"))
@click.option("--context", default="200,1500", show_default=True, help="Lengths in tokens.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
def main(
    heads: tuple[str, ...],
    drafts: tuple[str, ...],
    context: str,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Compare HEADS, each NAME=DIR, at several drafts and contexts."""
    lengths = context_lengths(context)
    settings = {
        name: EvalSettings(head=folder, draft=drafts[0], context=lengths, **options)
        for name, folder in named(heads).items()
    }
    first = next(iter(settings.values()))
    conversations = load_prompts(first.prompts, data_dir=first.data_dir)
    target = load_target(first)
    builder = RequestBuilder(target.tokenizer, target.max_context)
    conversations, warnings = bring_to(conversations, builder, lengths)
    loaded = {name: load_matching_head(one, target) for name, one in settings.items()}
    warnings += [warning for _, more in loaded.values() for warning in more]
    sessions = {
        (name, draft): Session(
            replace(settings[name], draft=draft_of(head, draft)), target, head, [], builder
        )
        for draft in drafts
        for name, (head, _) in loaded.items()
    }
    rows, judge = [], Judge(target)
    for tokens in lengths:
        wave = [builder.build(one) for one in conversations if context_of(one.task) == tokens]
        click.echo(f"{len(wave)} prompts of {tokens} tokens, {len(sessions)} arms", err=True)
        plain, arms = measure(sessions, wave, 1)
        rows += [row_of(tokens, key, arm, plain, judge) for key, arm in arms.items()]
    if json_path is not None:
        write_json(json_path, {"rows": rows, "leaders": leaders(rows), "warnings": warnings})
    said = [*leaders(rows), *(f"warning: {text}" for text in warnings)]
    show(table_of(rows), said, rows)


if __name__ == "__main__":
    sys.exit(run(main, name="heads.py"))
