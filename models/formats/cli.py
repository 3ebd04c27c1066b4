"""`headsmith export` and `headsmith import`: parse, call, print."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import torch

NAMES = ("vllm", "sglang", "trtllm", "speculators", "eagle", "tgi")
SOURCES = (
    "auto",
    "native",
    "vllm",
    "sglang",
    "specforge",
    "torchspec",
    "modelopt",
    "trtllm",
    "speculators",
    "eagle",
    "medusa",
    "tgi",
)
DTYPES = ("float32", "bfloat16", "float16")


@click.command()
@click.argument("head")
@click.option("--to", "name", required=True, type=click.Choice(NAMES), help="Engine or layout.")
@click.option("--out", required=True, help="Folder to write; must not be there yet.")
@click.option("--target", help="Folder of the target, where the head does not name it.")
@click.option(
    "--serve-as",
    metavar="NAME",
    help="Name under which the engine finds the target: Hub id or folder. [default: the target]",
)
@click.option(
    "--result",
    help="result.json of headsmith eval on this head; depth and tree come from it. [default: the "
    "validation of the head's own run]",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the weights. [default: as stored]")
@click.option("--overwrite", is_flag=True, help="Replace what is in --out.")
def export(
    head: str,
    name: str,
    out: str,
    target: str | None,
    serve_as: str | None,
    result: str | None,
    dtype: str | None,
    overwrite: bool,
) -> None:
    """Write HEAD as an engine loads it, with launch configs and a DEPLOY.md.

    The export is read back by a second loader and must give the head's own drafts, or nothing is
    written.
    """
    from headsmith.models.formats.export import export as write

    done = write(
        head,
        name,
        out,
        target=target,
        serve_as=serve_as,
        result=result,
        dtype=_dtype(dtype),
        overwrite=overwrite,
    )
    for warning in done.warnings:
        click.echo(f"headsmith: warning: {warning}", err=True)
    click.echo(f"{done.folder}: {name}, read back: {done.checked}")
    for file in done.files:
        click.echo(f"  launch/{file}")
    click.echo("  DEPLOY.md")


@click.command("import")
@click.argument("source")
@click.option("--out", required=True, help="Folder to write; must not be there yet.")
@click.option(
    "--from",
    "kind",
    type=click.Choice(SOURCES),
    default="auto",
    show_default=True,
    help="Who wrote it; auto reads it off the files, and asks where they leave it open.",
)
@click.option("--target", help="Folder, Hub id or GGUF file of its target. Recorded with the head.")
@click.option("--taps", help="Taps such as 2,15,27, states before those blocks, if not its own.")
@click.option("--rope-theta", type=float, help="RoPE base it was trained with, if not its own.")
@click.option(
    "--norm-output/--no-norm-output",
    default=None,
    help="Whether the normed state is fed back, if its config does not say it rightly.",
)
@click.option("--overwrite", is_flag=True, help="Replace what is in --out.")
def import_(
    source: str,
    out: str,
    kind: str,
    target: str | None,
    taps: str | None,
    rope_theta: float | None,
    norm_output: bool | None,
    overwrite: bool,
) -> None:
    """Read the head in SOURCE, made by somebody else, and write it as headsmith keeps heads.

    Nothing is lost: the tensors stay as they are stored. `headsmith eval --head OUT` verifies it.
    """
    from headsmith.models.formats.imports import import_head

    done = import_head(
        source,
        out,
        kind,
        target=target,
        taps=_taps(taps),
        rope_theta=rope_theta,
        norm_output=norm_output,
        overwrite=overwrite,
    )
    for warning in done.warnings:
        click.echo(f"headsmith: warning: {warning}", err=True)
    click.echo(f"{out}: {done.kind} head, read as {done.read_as}")


def _taps(text: str | None) -> tuple[int, ...] | None:
    from headsmith.errors import HeadsmithError

    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise HeadsmithError(f"taps {text!r} are no block numbers such as 2,15,27") from error


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
