"""What benchmarks/gpu.sh measured, as Markdown tables: `python benchmarks/gpu_table.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from headsmith.cli import run
from headsmith.errors import HeadsmithError
from headsmith.files import write_json, write_text
from headsmith.inference.environment import device_info, pick_device, versions
from headsmith.inference.figures import number


def read(folder: Path, pattern: str) -> list[Any]:
    """The objects of the JSON files of that name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))]


def decoding(rows: list[dict[str, Any]]) -> list[str]:
    """A line a shape, batch and draft; its speed by each wish, and over plain decoding."""
    wishes = list(dict.fromkeys(row["wish"] for row in rows if row["wish"]))
    by_case: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault((row["shape"], row["batch"], row["draft"]), {})[row["wish"]] = row
    head = ["shape", "batch", "draft", "tau", *(f"tokens/s, {w}" for w in wishes)]
    lines = [[*head, *(f"over plain, {w}" for w in wishes)]]
    for (shape, batch, draft), found in by_case.items():
        plain = by_case.get((shape, batch, "none"), {})
        speeds = [found.get(wish, found.get("", {})).get("tokens_per_s") for wish in wishes]
        bases = [plain.get(wish, {}).get("tokens_per_s") for wish in wishes]
        gains = [s / b if s and b else None for s, b in zip(speeds, bases, strict=True)]
        tau = next((row["tau"] for row in found.values() if row.get("tau")), None)
        cells = [number(tau), *(number(s, 1) for s in speeds), *(number(g) for g in gains)]
        lines.append([shape, str(batch), draft, *cells])
    return table(lines)


def table(lines: list[list[str]]) -> list[str]:
    """Markdown, the first line its head."""
    first, *rest = lines
    return ["| " + " | ".join(line) + " |" for line in (first, ["---"] * len(first), *rest)]


def report(found: dict[str, Any]) -> str:
    """Everything as one text."""
    device = found["device"]
    good = sum(row["good"] for row in found["kernels"])
    lines = [f"# {device['name']}", "", ", ".join(f"{k} {v}" for k, v in found["versions"].items())]
    lines += ["", f"Kernels as their references: {good} of {len(found['kernels'])} checks.", ""]
    lines += [*decoding(found["decoding"]), ""]
    lines += table(
        [
            ["training", "tokens/s", "s a step"],
            *(
                [row["wish"], number(row["tokens_per_s"], 0), number(row["seconds_a_step"], 3)]
                for row in found["training"]["rows"]
            ),
        ]
    )
    lines += ["", f"Losses differ by at most {found['training']['losses_apart']:.1e}."]
    return "\n".join(lines) + "\n"


@click.command()
@click.argument("folder", type=Path)
@click.option("--dry", is_flag=True, help="Of a run without a GPU.")
def main(folder: Path, dry: bool) -> None:
    """Write result.json and table.md in FOLDER and print the table."""
    kernels, training = read(folder, "kernels.json"), read(folder, "training.json")
    if not kernels or not training:
        raise HeadsmithError(f"{folder} lacks kernels.json or training.json; run benchmarks/gpu.sh")
    found = {
        "device": device_info(pick_device("cpu" if dry else "cuda")),
        "versions": versions(),
        "dry": dry,
        "kernels": kernels[0],
        "decoding": [row for rows in read(folder, "decode-*.json") for row in rows],
        "training": training[0],
    }
    write_json(folder / "result.json", found)
    text = report(found)
    write_text(folder / "table.md", text)
    click.echo(text)


if __name__ == "__main__":
    sys.exit(run(main, name="gpu_table.py"))
