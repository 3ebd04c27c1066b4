"""The command `headsmith data capture`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from headsmith.train.recipe import load_recipe


@click.command()
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the features.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "fp8"]),
    default="bfloat16",
    show_default=True,
    help="How states are stored; fp8 has a scale for every token and tap.",
)
@click.option(
    "--shard-mb",
    type=click.FloatRange(min=0, min_open=True),
    default=256.0,
    show_default=True,
    help="Largest shard; what a killed capture computes again, and training waits for.",
)
@click.option(
    "--backend",
    type=click.Choice(["transformers", "vllm"]),
    default="transformers",
    show_default=True,
    help="Who runs the target: this process, or vLLM in one of its own.",
)
@click.option(
    "--vllm-server",
    metavar="URL",
    help="A vLLM server that keeps hidden states in a folder shared with this machine.",
)
@click.option(
    "--vllm-python",
    default="python3",
    show_default=True,
    help="The Python of an environment with vLLM (0.32.0 is what was tried).",
)
@click.option(
    "--vllm-devices",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Devices over which vLLM spreads the target.",
)
@click.option(
    "--check",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Compare every byte of the features in DIR with its checksums; capture nothing.",
)
def capture(
    recipe: str | None,
    overrides: tuple[str, ...],
    out: Path | None,
    dtype: str,
    shard_mb: float,
    backend: str,
    vllm_server: str | None,
    vllm_python: str,
    vllm_devices: int,
    check: Path | None,
) -> None:
    """Run the target once over what RECIPE trains on and store its states, for `data.features`.

    Started again it goes on where it stopped. Training can start at once, with data.features=DIR.
    """
    if check is not None:
        if recipe is not None or out is not None:
            raise click.UsageError("--check looks at a folder and captures nothing: give it alone")
        from headsmith.train.capture import check as compare

        compare(check, lambda line: click.echo(line, err=True))
        return
    if recipe is None or out is None:
        raise click.UsageError("give a RECIPE and --out, or --check DIR")
    settings = load_recipe(recipe, overrides)
    from headsmith.data.feature_codec import DTYPES
    from headsmith.train.capture import Backend
    from headsmith.train.capture import capture as run

    name: Literal["vllm", "transformers"] = "vllm" if backend == "vllm" else "transformers"
    who = Backend(name, vllm_python, vllm_devices, vllm_server)
    store = run(settings, out, next(d for d in DTYPES if d == dtype), shard_mb, who)
    if store.done == len(store.shards):
        click.echo(f"to train on them: headsmith train {recipe} data.features={out}", err=True)
