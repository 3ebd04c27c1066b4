"""A profile for people: the machine, a table of stages a batch size, the cost model in a line."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from headsmith.inference.figures import number, percent
from headsmith.inference.report import open_table


def print_profile(found: dict[str, Any], console: Console) -> None:
    """Prints everything but the curve's every point."""
    machine = found["machine"]
    console.print(
        Text(
            f"{found['head']} ({found['draft']}) on {found['target']}, {found['dtype']}, "
            f"{found['device']['name']}: {machine['bytes_per_s'] / 1e9:.1f} GB/s from memory "
            f"(copy {machine['copy_bytes_per_s'] / 1e9:.1f}, read "
            f"{machine['read_bytes_per_s'] / 1e9:.1f}), {machine['flops_per_s'] / 1e9:.0f} Gop/s"
        )
    )
    for part in found["batches"]:
        title = f"batch {part['batch']}, {part['context']:.0f} tokens of context"
        columns = ("calls a\nround", "ms a\ncall", "ms a\nround", "MB a\ncall", "GB/s", "roofline")
        table = open_table(title, "stage", *columns)
        for name, rows in (("drafted", part["stages"]), ("plain", part["plain"])):
            for row in rows:
                table.add_row(f"{name}: {row['stage']}", *_cells(row))
            table.add_section()
        console.print(table)
        for line in sentences(part):
            console.print(Text(line))
    for warning in found["warnings"]:
        console.print(Text(f"warning: {warning}", style="yellow"))


def _cells(row: dict[str, Any]) -> list[str]:
    size, rate = row["bytes"], row["bytes_per_s"]
    return [
        number(row["calls"], 1),
        number(row["ms_per_call"], 3),
        number(row["ms_per_round"], 3),
        number(None if size is None else size / 1e6),
        number(None if rate is None else rate / 1e9, 1),
        percent(row["roofline"]),
    ]


def sentences(part: dict[str, Any]) -> list[str]:
    """The cost model of a batch size, and what it says."""
    model = part["model"]
    points = ", ".join(f"{one['tau']:.0f}: {one['speedup']:.2f}" for one in part["curve"])
    ran = ", ".join(part["kernels"]) or "none, plain PyTorch"
    return [
        f"{model['of']}: a plain one takes {model['plain_ms']:.2f} ms, a drafted one "
        f"{model['round_ms']:.2f}; "
        f"in plain rounds: c_v {model['c_v']:.3f}, c_d {model['c_d']:.3f} (of {model['steps']} "
        f"steps), c_o {model['c_o']:.3f}",
        f"tau {model['tau']:.2f} / {model['break_even']:.3f} = {model['predicted_speedup']:.2f} "
        f"times plain decoding; drafting pays above tau {model['break_even']:.2f}",
        f"speedup for tau {points}",
        f"kernels: {ran}",
    ]
