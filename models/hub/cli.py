"""`headsmith push` and `headsmith pull`. Heavy imports happen inside the commands."""

from __future__ import annotations

from pathlib import Path

import click

from headsmith.errors import HeadsmithError
from headsmith.models.hub.client import Repo, parse_repo


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--repo", required=True, help="ORG/NAME; made if it is not there.")
@click.option("--revision", help="Branch to publish to; made if it is not there. [default: main]")
@click.option("--base-model", help="The target's name on the Hub. [default: as in headsmith.json]")
@click.option(
    "--result",
    "results",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A result.json of headsmith eval for the card; repeat for several.",
)
@click.option("--license", "license_", help="Licence of the head, such as apache-2.0.")
@click.option("--data", help="What it was trained on, in words for the card.")
@click.option("--private/--public", default=True, show_default=True, help="Of a new repository.")
@click.option("--force", is_flag=True, help="Replace another head that the revision holds.")
@click.option("--dry-run", is_flag=True, help="Show the card and the files; send nothing.")
@click.option("--target", help="Target to check it against. [default: its own, if it is here]")
@click.option("--allow-mismatch", is_flag=True, help="Publish in spite of what doctor finds.")
def push(
    folder: Path,
    repo: str,
    revision: str | None,
    base_model: str | None,
    results: tuple[Path, ...],
    license_: str | None,
    data: str | None,
    private: bool,
    force: bool,
    dry_run: bool,
    target: str | None,
    allow_mismatch: bool,
) -> None:
    """Publish the head in FOLDER on the Hub with a model card.

    It is checked as by headsmith doctor before anything is sent. Run it again after an
    interruption; what arrived is not sent twice.
    """
    import tempfile

    from headsmith.models.hub.push import publish
    from headsmith.models.hub.release import ReleaseSettings, prepare

    name = Repo(_repo(repo).name, revision or _repo(repo).revision)
    cautions = _checked(folder, target, allow_mismatch)
    for one in cautions:
        click.echo(f"headsmith: warning: {one}", err=True)
    settings = ReleaseSettings(name, base_model, list(results), license_, data)
    with tempfile.TemporaryDirectory(prefix="headsmith-push-") as work:
        release = prepare(folder, settings, cautions, Path(work))
        if dry_run:
            click.echo(release.card, nl=False)
            for file, path in sorted(release.files.items()):
                click.echo(f"headsmith: {path.stat().st_size:>12,} bytes  {file}", err=True)
            click.echo(f"headsmith: nothing was sent to {name}", err=True)
            return
        done = publish(release, private=private, force=force)
    seen = "private" if done.private else "public"
    what = "published" if done.changed else "already there, nothing was sent"
    click.echo(f"{done.url} ({seen}), commit {done.commit}: {what}")


@click.command()
@click.argument("repo")
@click.option("--revision", help="Branch, tag or commit. [default: main]")
@click.option("--into", type=click.Path(path_type=Path), help="Folder. [default: the Hub's cache]")
def pull(repo: str, revision: str | None, into: Path | None) -> None:
    """Fetch the head in the repository REPO (ORG/NAME) and print its folder."""
    from headsmith.models.hub.pull import pull as fetch

    named = _repo(repo)
    click.echo(fetch(Repo(named.name, revision or named.revision), into))


def _repo(text: str) -> Repo:
    repo = parse_repo(text)
    if repo is None:
        raise HeadsmithError(f"{text!r} names no repository of the Hub; give it as ORG/NAME")
    return repo


def _checked(folder: Path, target: str | None, allow_mismatch: bool) -> list[str]:
    """What doctor warns of; HeadsmithError for its errors."""
    from headsmith.models.doctor.examine import examine
    from headsmith.models.doctor.findings import refuse_errors
    from headsmith.models.doctor.target import TargetFacts
    from headsmith.models.provenance import own_target

    path, revision = (target, None)
    if target is None and folder.is_dir():
        path, revision = own_target(folder)
    facts = TargetFacts.read(path, revision) if path is not None else None
    return refuse_errors(examine(folder, facts), allow_mismatch)
