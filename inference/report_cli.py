"""`headsmith report`: the report of a run that is measured already, from its result.json."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("folder", type=click.Path(path_type=Path))
def report(folder: Path) -> None:
    """Write summary.md, CSV, plots and report.html of a run again, from its result.json.

    For plots after matplotlib was installed, or with a newer headsmith. FOLDER is what
    `headsmith eval --out` wrote; result.json itself stays as it is.
    """
    from headsmith.files import atomic_files
    from headsmith.inference import plots
    from headsmith.inference.compare import load_result
    from headsmith.inference.diagnose_report import write_diagnosis
    from headsmith.inference.report_files import drop_stale_plots, write_report

    result = load_result(folder / "result.json")
    if not plots.can_plot():
        click.echo(f"headsmith: {plots.NO_PLOT}", err=True)
    with atomic_files(folder) as fresh:
        write_report(fresh, result)
        if "diagnosis" in result:
            write_diagnosis(fresh, result["diagnosis"])
        written = {path.name for path in fresh.iterdir()}
    drop_stale_plots(folder, written)
    click.echo(f"wrote {', '.join(sorted(written))} into {folder}")
