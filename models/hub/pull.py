"""Heads from the Hub, for `headsmith pull` and for every option that takes a head."""

from __future__ import annotations

from pathlib import Path

from headsmith.errors import HeadsmithError
from headsmith.models.hub.client import Repo, connect, endpoint, faults, is_repo, parse_repo

# Weights and what describes them, not what else a repository holds.
WANTED = ["*.json", "*.safetensors", "pytorch_model.bin", "*.md", "LICENSE*"]


def local_head(head: str | Path) -> Path:
    """The folder of a head: `head` itself if it is one, else the copy of the repository ORG/NAME or
    ORG/NAME@REVISION in the Hub's cache, fetched unless it is there.

    Raises HeadsmithError for what is neither.
    """
    if Path(head).is_dir() or not is_repo(str(head)):
        return Path(head)
    repo = parse_repo(str(head))
    assert repo is not None
    return pull(repo)


def pull(repo: Repo, into: Path | None = None) -> Path:
    """Fetch a head; returns its folder, `into` or one in the Hub's cache.

    A file that is there is not fetched again, and a connection that is cut goes on where it was.
    Raises HeadsmithError when the repository holds no head or `into` is in use.
    """
    from huggingface_hub import snapshot_download

    if into is not None and into.exists() and not (into / ".cache" / "huggingface").is_dir():
        if not into.is_dir() or any(into.iterdir()):
            raise HeadsmithError(
                f"{into} holds something that was not pulled; choose another folder with --into"
            )
    connect()
    with faults(repo, "read"):
        folder = Path(
            snapshot_download(
                repo.name,
                revision=repo.revision,
                local_dir=into,
                allow_patterns=WANTED,
                endpoint=endpoint(),
            )
        )
    if not (folder / "config.json").is_file():
        raise HeadsmithError(
            f"the repository {repo} holds no head: there is no config.json in it; check its name"
        )
    return folder
