"""`headsmith calibrate`: measure Medusa heads and store their draft tree beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headsmith.inference import options as shared


@click.command()
@click.option("--head", required=True, help="Folder of the Medusa heads, or ORG/NAME.")
@shared.target
@click.option(
    "--prompts",
    default="default",
    show_default=True,
    help="JSONL file or task, as for headsmith eval; not what the head will be judged on.",
)
@click.option("--nodes", default=16, show_default=True, help="Drafts in the tree, the root apart.")
@click.option("--max-new-tokens", default=128, show_default=True, help="Longest answer, in tokens.")
@click.option("--batch", default=8, show_default=True, help="Requests decoded at a time.")
@shared.limit
@shared.dtype
@shared.device
@click.option("--allow-mismatch", is_flag=True, help="Measure on a target that is not the head's.")
@shared.threads
def calibrate(nodes: int, batch: int, **options: Any) -> None:
    """Build the draft tree of Medusa heads from how often they are right.

    The target answers the prompts greedily, every head is measured on the answers, and the tree of
    NODES drafts that commits the most tokens a pass is written to medusa_tree.json in the head's
    folder, for `headsmith eval --draft stored`.
    """
    from rich.console import Console

    from headsmith.errors import HeadsmithError
    from headsmith.inference.calibrate import calibrate as measure
    from headsmith.inference.cli import progress_bar
    from headsmith.inference.evaluate import EvalSettings, load_pair
    from headsmith.inference.prompts import RequestBuilder, load_prompts
    from headsmith.models.medusa import MedusaHead
    from headsmith.models.medusa_files import write_calibration

    if nodes < 1:
        raise click.UsageError(f"nodes is {nodes}; it must be 1 or more")
    settings = EvalSettings(batch=(batch,), **options)
    conversations = load_prompts(settings.prompts, limit=settings.limit)
    with progress_bar() as show:
        target, head, warnings = load_pair(settings)
        if not isinstance(head, MedusaHead):
            raise HeadsmithError(
                f"{settings.head} holds a head of kind {head.kind if head else None}; only Medusa "
                "heads have a stored draft tree, others take --draft tree:NODES,TOPK,DEPTH"
            )
        builder = RequestBuilder(target.tokenizer, target.max_context)
        requests = [builder.build(one) for one in conversations]
        limit = settings.max_new_tokens
        found = measure(
            head,
            target,
            requests,
            nodes=nodes,
            max_new_tokens=limit,
            batch=batch,
            on_progress=show,
        )
    found.about.update(source=settings.prompts, max_new_tokens=limit, dtype=settings.dtype)
    assert settings.head is not None
    file = write_calibration(Path(settings.head), found)
    console = Console(highlight=False)
    for warning in warnings:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    console.print(summary(found.choices, found.about), markup=False, soft_wrap=True)
    console.print(f"stored in {file}; headsmith eval --draft stored drafts it", soft_wrap=True)


def summary(choices: list[list[int]], about: dict[str, Any]) -> str:
    """One line: the tree and what it promises."""
    depth = max(map(len, choices))
    levels = "/".join(str(sum(len(p) == m for p in choices)) for m in range(1, depth + 1))
    return (
        f"{about['predicted_tau']:.3f} tokens a pass predicted for a tree of {len(choices)} drafts "
        f"({levels} at depth 1 to {depth}), from {about['tokens']} tokens of {about['prompts']} "
        f"answers; {about['independent_tau']:.3f} if the heads were independent"
    )
