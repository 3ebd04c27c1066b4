"""The command `headsmith train`, which is also what `accelerate launch -m headsmith.train` runs."""

from __future__ import annotations

import click

from headsmith.errors import HeadsmithError
from headsmith.train.recipe import Recipe, load_recipe


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
def train(
    recipe: str, overrides: tuple[str, ...], plan: bool, resume: bool | None, overwrite: bool
) -> None:
    """Train a draft head from RECIPE, a YAML file or a packaged recipe like quickstart/eagle3.

    This process trains alone; for several, use
    `accelerate launch -m headsmith.train RECIPE [KEY.SUB=VALUE]...` with the same arguments.
    """
    if overwrite and resume:
        raise click.UsageError("--resume continues a run and --overwrite removes it: give one")
    settings = load_recipe(recipe, overrides)
    _check_draft(settings)
    if plan:
        from headsmith.train.plan import print_plan

        print_plan(settings)
        return
    from headsmith.train.loop import train as run

    click.echo(f"the head to use: {run(settings, resume=resume, overwrite=overwrite)}", err=True)


def _check_draft(recipe: Recipe) -> None:
    """Not a rule of the recipe's own, because reading one imports no torch."""
    from headsmith.inference.tree import Calibrated, Chain, parse_shape

    try:
        shape = parse_shape(recipe.validation.draft)
    except HeadsmithError as error:
        raise HeadsmithError(f"validation.draft: {error}") from error
    medusa = recipe.head.kind == "medusa"
    if isinstance(shape, Calibrated) or (medusa and not isinstance(shape, Chain)):
        raise HeadsmithError(
            f"validation.draft: {shape} cannot be drafted by a head of kind {recipe.head.kind} in "
            "training; take a chain, for example chain:4"
        )
    if medusa and shape.depth > recipe.steps:
        raise HeadsmithError(
            f"validation.draft: {shape} goes {shape.depth} drafts deep and head.num_heads is "
            f"{recipe.steps}; draft no deeper than there are heads"
        )
