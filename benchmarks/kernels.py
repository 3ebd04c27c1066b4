"""Registers, spills, shared memory and theoretical occupancy of every kernel on every architecture,
compiled ahead of time, without a GPU: `python benchmarks/kernels.py`.

Exits 1 if a kernel spills registers.
"""

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import click

from headsmith.inference.kernels.aot import (
    ARCHITECTURES,
    MULTIPROCESSORS,
    Compiled,
    Specimen,
    collect,
    compile_for,
)

PACKAGES = ("headsmith.inference.kernels", "headsmith.train.kernels")


def specimens(only: str) -> list[Specimen]:
    """The kernels of both rooms whose name contains `only`."""
    rooms = [package for package in PACKAGES if find_spec(package) is not None]
    return [one for package in rooms for one in collect(package) if only in one.name]


def table(found: list[Compiled]) -> str:
    """A Markdown table: one line a kernel, one group of figures an architecture."""
    architectures = sorted({one.architecture for one in found})
    by_name: dict[str, dict[int, Compiled]] = {}
    for one in found:
        by_name.setdefault(one.name, {})[one.architecture] = one
    heads = [f"sm_{a}: registers, spills (B), shared (KiB), occupancy" for a in architectures]
    lines = [f"| kernel | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name, row in by_name.items():
        cells = [_cell(row[a]) if a in row else "" for a in architectures]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(one: Compiled) -> str:
    return f"{one.registers}, {one.spills}, {one.shared / 1024:.1f}, {100 * one.occupancy:.0f} %"


@click.command()
@click.option("--only", default="", help="Only kernels whose name contains this.")
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    type=click.Choice([str(a) for a in ARCHITECTURES]),
    help="Compute capability; all by default.",
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also write the figures.")
def main(only: str, architectures: tuple[str, ...], path: Path | None) -> None:
    """Compile the kernels and print the table."""
    wanted = [int(a) for a in architectures] or list(ARCHITECTURES)
    found = [compile_for(s, a) for s in specimens(only) for a in wanted if a in s.architectures]
    if not found:
        raise click.ClickException(f"no kernel's name contains {only!r}")
    print(table(found))
    if path is not None:
        path.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    # A block of this size could not be launched at all.
    large = [c for c in found if c.shared + 1024 > MULTIPROCESSORS[c.architecture].shared]
    bad = {f"{c.name} on sm_{c.architecture}" for c in found if c.spills} | {
        f"{c.name} on sm_{c.architecture}" for c in large
    }
    if bad:
        print(f"spills, or does not fit: {', '.join(sorted(bad))}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
