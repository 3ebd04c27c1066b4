"""The coupled test on a real target: with noise keyed by seed, request and position, the text with
each drafter must be that of plain decoding, token for token.

    python benchmarks/coupled.py --target DIR outputs/a/best=chain:4 outputs/a/best=tree:24,4,5 \
        ngram=chain:4 lookahead cut:4=chain:4 text=chain:8 --prompts default:40

A drafter is a head's folder or a `--drafter` of headsmith eval, `=` its draft; `cut:N` is the
target's first N blocks as a small model, and `text` gives every prompt its own plain answer with a
tenth of the words edited. Rule `sample` in float32 at each --temperature (0 is greedy), top-p 0.9
and penalties on. One line for each drafter, temperature and batch size: how many texts are the
plain decoder's at batch 1, tau, and what the equality check says of every token; --json keeps
them. Two logits that are closer than float32 rounds may change places between a pass of one row and
one of several: such a text differs and the check calls the token a tie. Exits with 3 if a token is
neither the rule's choice nor a tie.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from drafters import drafter_of, temperatures
from given_text import edits
from heads import Judge

from headsmith.cli import run
from headsmith.errors import EqualityFailed, HeadsmithError
from headsmith.files import write_json
from headsmith.inference.cli import batch_sizes
from headsmith.inference.drafter_choice import FromHead, Nothing, parse_drafter
from headsmith.inference.drafters import Drafter
from headsmith.inference.engine import Decoder
from headsmith.inference.evaluate import load_matching_head, load_target
from headsmith.inference.make_drafter import drafter_source, make_drafter
from headsmith.inference.metrics import summarise
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.records import Request, Response
from headsmith.inference.settings import EvalSettings
from headsmith.inference.tree import parse_shape
from headsmith.models.target import Target

# Of the words of a plain answer, before it is given as text.
EDITED_PERCENT = 10.0
Row = dict[str, Any]


def settings_at(temperature: float, target: str, penalties: bool) -> EvalSettings:
    """What is measured at one temperature; top-p means nothing for greedy."""
    return EvalSettings(
        target=target,
        drafter="none",
        rule="sample" if temperature else "greedy",
        temperature=temperature,
        top_p=0.9 if temperature else None,
        repetition_penalty=1.1 if penalties else None,
        presence_penalty=0.2 if penalties else None,
        frequency_penalty=0.1 if penalties else None,
        device="cpu",
    )


def named(text: str, target: str, folder: Path) -> tuple[str, str]:
    """What `FOLDER=DRAFT` or `DRAFTER[=DRAFT]` names, and its draft; a cut is made in `folder`."""
    name, draft = text.rpartition("=")[::2] if "=" in text else (text, "")
    if Path(name).is_dir():
        if not draft:
            raise HeadsmithError(f"give the head {name} a draft, such as {name}=chain:4")
        return name, draft
    choice = drafter_of(name, target, folder)
    if isinstance(parse_drafter(choice), FromHead | Nothing):
        raise HeadsmithError(f"{name!r} names no drafter; give a head's folder, or ngram")
    return choice, draft


def source_of(
    name: str, draft: str, settings: EvalSettings, target: Target
) -> Callable[[], Drafter]:
    """What makes the drafter of a name of `named`, one for each decoder."""
    if not Path(name).is_dir():
        return drafter_source(parse_drafter(name), target, draft)
    head, _ = load_matching_head(replace(settings, drafter="head", head=name), target)
    return lambda: make_drafter(head, target, parse_shape(draft), settings.make_rule())


def row_of(responses: list[Response], plain: list[Response], judge: Judge) -> Row:
    """How the texts of one drafter compare with the plain ones."""
    pairs = zip(responses, plain, strict=True)
    return {
        "requests": len(responses),
        "same": sum(one.output_ids == other.output_ids for one, other in pairs),
        "tau": summarise(responses)["tau"],
        **judge.judge(responses),
    }


def line_of(row: Row) -> str:
    """One row, for people."""
    tau = "-" if row["tau"] is None else f"{row['tau']:.2f}"
    return (
        f"{row['drafter']} {row['draft']} T {row['temperature']:g} batch {row['batch']}: "
        f"{row['same']} of {row['requests']} texts identical, tau {tau}; "
        f"{row['exact']} tokens exact, {row['ties']} ties, {row['fails']} fails"
    )


@click.command()
@click.argument("drafters", nargs=-1, required=True, metavar="DRAFTER[=DRAFT]...")
@click.option("--target", "path", required=True, help="Folder, Hub id or GGUF file.")
@click.option("--prompts", default="default:40", show_default=True)
@click.option("--data-dir")
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
@click.option("--batch", default="1,8", show_default=True)
@click.option("--temperature", default="0.3,0.7,1.0", show_default=True)
@click.option("--penalties/--no-penalties", default=True, show_default=True)
@click.option("--json", "json_path", type=Path, help="Write everything here.")
def main(
    drafters: tuple[str, ...],
    path: str,
    prompts: str,
    data_dir: str | None,
    max_new_tokens: int,
    batch: str,
    temperature: str,
    penalties: bool,
    json_path: Path | None,
) -> None:
    """DRAFTERS such as outputs/a/best=chain:4, ngram=chain:4, lookahead, cut:4=chain:4."""
    sizes, degrees = batch_sizes(batch), temperatures(temperature)
    settings = {degree: settings_at(degree, path, penalties) for degree in degrees}
    target = load_target(settings[degrees[0]])
    rows: list[Row] = []

    def decode(requests: list[Request], degree: float, size: int, **more: Any) -> list[Response]:
        rule = settings[degree].make_rule()
        decoder = Decoder(target, batch=size, max_new_tokens=max_new_tokens, rule=rule, **more)
        return decoder.generate(requests)[0]

    with tempfile.TemporaryDirectory() as folder:
        pairs = [named(text, path, Path(folder)) for text in drafters]
        builder = RequestBuilder(target.tokenizer, target.max_context)
        asked = [builder.build(one) for one in load_prompts(prompts, data_dir=data_dir)]
        for degree in degrees:
            judge = Judge(target, settings[degree].make_rule())
            plain = decode(asked, degree, 1)
            requests = edits(target, plain, EDITED_PERCENT, seed=0)
            for text, (name, draft) in zip(drafters, pairs, strict=True):
                source = source_of(name, draft, settings[degree], target)
                for size in sizes:
                    got = decode(requests, degree, size, drafter=source())
                    about = {"drafter": text.rpartition("=")[0] or text, "draft": draft}
                    about |= {"temperature": degree, "batch": size}
                    rows.append(about | row_of(got, plain, judge))
                    click.echo(line_of(rows[-1]))
    if json_path is not None:
        write_json(json_path, {"rows": rows})
    if fails := sum(row["fails"] for row in rows):
        raise EqualityFailed(f"{fails} output tokens are not the rule's own choice")


if __name__ == "__main__":
    sys.exit(run(main, name="coupled.py"))
