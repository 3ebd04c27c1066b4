"""The coupled test on a real target: with noise keyed by seed, request and position, the text with
each head must be that of plain decoding, token for token.

    python benchmarks/coupled.py outputs/a/best=chain:4 outputs/a/best=tree:24,4,5 \
        outputs/m/best=chain:4 --prompts default:40 --max-new-tokens 64 --batch 1,8

Rule `sample` in float32 at each --temperature (0 is greedy), top-p 0.9 and penalties on. One line
for each head, draft, temperature and batch size: how many texts are the plain decoder's, tau, and
what the equality check says of every token. Two logits that are closer than float32 rounds may
change places between a pass of one row and one of several: such a text differs and the check calls
the token a tie. Exits with 3 if a token is neither the rule's choice nor a tie.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from headsmith.cli import run
from headsmith.errors import EqualityFailed, HeadsmithError
from headsmith.inference.cli import batch_sizes
from headsmith.inference.engine import Decoder
from headsmith.inference.equality import check_equality
from headsmith.inference.evaluate import load_matching_head, load_target
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.metrics import summarise
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.records import Request, Response
from headsmith.inference.settings import EvalSettings
from headsmith.inference.tree import parse_shape
from headsmith.models.target import Target

LINE = (
    "{} {} T {} batch {}: {} of {} texts identical, tau {:.2f}; {} tokens exact, {} ties, {} fails"
)


def settings_at(temperature: float, head: str, penalties: bool) -> EvalSettings:
    """What is measured at one temperature; top-p means nothing for greedy."""
    return EvalSettings(
        head=head,
        rule="sample" if temperature else "greedy",
        temperature=temperature,
        top_p=0.9 if temperature else None,
        repetition_penalty=1.1 if penalties else None,
        presence_penalty=0.2 if penalties else None,
        frequency_penalty=0.1 if penalties else None,
        device="cpu",
    )


def decode(
    target: Target,
    settings: EvalSettings,
    requests: list[Request],
    batch: int,
    limit: int,
    draft: str,
) -> list[Response]:
    """Responses with the head of `settings` and a draft shape, or plain ones without a shape."""
    rule, drafter = settings.make_rule(), None
    if draft:
        head, _ = load_matching_head(settings, target)
        drafter = make_drafter(head, target, parse_shape(draft), rule)
    decoder = Decoder(target, drafter, batch=batch, max_new_tokens=limit, rule=rule)
    return decoder.generate(requests)[0]


@click.command()
@click.argument("heads", nargs=-1, required=True)
@click.option("--prompts", default="default:40", show_default=True)
@click.option("--data-dir")
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
@click.option("--batch", default="1,8", show_default=True)
@click.option("--temperature", default="0.3,0.7,1.0", show_default=True)
@click.option("--penalties/--no-penalties", default=True, show_default=True)
def main(
    heads: tuple[str, ...],
    prompts: str,
    data_dir: str | None,
    max_new_tokens: int,
    batch: str,
    temperature: str,
    penalties: bool,
) -> None:
    """HEADS: folder=draft, such as outputs/a/best=chain:4."""
    pairs = [one.rpartition("=")[::2] for one in heads]
    if not all(folder for folder, _ in pairs):
        raise HeadsmithError("name each head with its draft, such as outputs/a/best=chain:4")
    target = load_target(settings_at(0.0, pairs[0][0], penalties))
    conversations = load_prompts(prompts, data_dir=data_dir)
    builder = RequestBuilder(target.tokenizer, target.max_context)
    requests = [builder.build(one) for one in conversations]
    fails = 0
    for degree in map(float, temperature.split(",")):
        plain = decode(
            target, settings_at(degree, pairs[0][0], penalties), requests, 1, max_new_tokens, ""
        )
        for folder, draft in pairs:
            settings = settings_at(degree, folder, penalties)
            for size in batch_sizes(batch):
                got = decode(target, settings, requests, size, max_new_tokens, draft)
                same = sum(
                    one.output_ids == other.output_ids
                    for one, other in zip(got, plain, strict=True)
                )
                judged = check_equality(target, got, rule=settings.make_rule())
                fails += judged.fails
                name, tau = str(Path(folder)), summarise(got)["tau"]
                counts = (judged.exact, judged.ties, judged.fails)
                click.echo(
                    LINE.format(name, draft, degree, size, same, len(got), tau or 0.0, *counts)
                )
    if fails:
        raise EqualityFailed(f"{fails} output tokens are not the rule's own choice")


if __name__ == "__main__":
    sys.exit(run(main))
