"""`headsmith doctor`: check a head, and whether it is for this target, before anything runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from headsmith.models.doctor.findings import Finding

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@click.command()
@click.argument("head")
@click.option(
    "--target", help="Folder, Hub id or GGUF file. [default: the head's own, if it is here]"
)
@click.option("--revision", help="Revision of a target on the Hub.")
@click.option("--json", "json_path", help="Also write the findings here; - is standard output.")
def doctor(head: str, target: str | None, revision: str | None, json_path: str | None) -> None:
    """Check the checkpoint HEAD (a folder or ORG/NAME) against its target.

    Every finding is one sentence with what to do. Nothing is loaded: the target's weights are not
    needed. The exit code is 2 when a finding is an error.
    """
    from rich.console import Console

    from headsmith.files import write_json
    from headsmith.models.doctor.examine import examine, report
    from headsmith.models.doctor.target import TargetFacts
    from headsmith.models.hub.pull import local_head
    from headsmith.models.provenance import own_target

    folder = local_head(head)
    if target is None:
        target, revision = own_target(folder)
    facts = TargetFacts.read(target, revision) if target is not None else None
    findings = examine(folder, facts)
    said = report(head, target, findings)
    print_findings(said, findings, Console(stderr=json_path == "-", highlight=False))
    if json_path == "-":
        click.echo(json.dumps(said, indent=2, ensure_ascii=False))
    elif json_path is not None:
        write_json(json_path, said)
    if said["errors"]:
        click.get_current_context().exit(2)


def print_findings(said: dict[str, object], findings: list[Finding], console: Console) -> None:
    """One line a finding, and how many there were."""
    for one in findings:
        style = _STYLES[one.level]
        console.print(f"[{style}]{one.level}[/] ", end="")
        console.print(f"{one.check}: {one.sentence}", markup=False, soft_wrap=True)
    against = f"against {said['target']}" if said["target"] else "alone; add --target to compare it"
    counts = ", ".join(f"{said[kind]} {kind}" for kind in ("errors", "warnings", "notes"))
    console.print(f"{said['head']} was checked {against}: {counts}", markup=False, soft_wrap=True)
