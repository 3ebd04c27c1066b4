"""The command `headsmith train`, which is also what `accelerate launch -m headsmith.train` runs."""

from __future__ import annotations

import os
from contextlib import nullcontext

import click

from headsmith.train.recipe import load_recipe


@click.command("train", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
@click.option(
    "--plan", is_flag=True, help="Print what would run, and what it takes; train nothing."
)
@click.option(
    "--resume/--no-resume",
    default=None,
    help="Continue the run in output.dir even if its recipe differs, or refuse to continue any. "
    "Without either, a run of the same recipe is continued.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Start over, removing what an earlier run wrote in output.dir.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="At the end, print the seconds and bytes of each stage of a step.",
)
def train(
    recipe: str,
    overrides: tuple[str, ...],
    plan: bool,
    resume: bool | None,
    overwrite: bool,
    profile: bool,
) -> None:
    """Train a draft head from RECIPE, a YAML file or a packaged recipe like quickstart/eagle3.

    This process trains alone; for several, use
    `accelerate launch -m headsmith.train RECIPE [KEY.SUB=VALUE]...` with the same arguments.
    """
    if overwrite and resume:
        raise click.UsageError("--resume continues a run and --overwrite removes it: give one")
    settings = load_recipe(recipe, overrides)
    from headsmith.train.validate import check_draft

    check_draft(settings)
    if plan:
        from headsmith.train.plan import print_plan

        print_plan(settings)
        return
    from headsmith.train.loop import train as run
    from headsmith.train.stages import profiling

    with profiling() if profile else nullcontext() as stages:
        try:
            head = run(settings, resume=resume, overwrite=overwrite)
        finally:
            # An interrupted run shows it too; of several processes, the first one.
            if stages is not None and os.environ.get("RANK", "0") == "0":
                click.echo(stages.table(), err=True)
    click.echo(f"the head to use: {head}", err=True)
