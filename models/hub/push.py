"""Publishing a release: in one commit, or not at all, and never silently over another one.

A push that is interrupted is run again: large files that arrived are not sent twice, and the commit
that makes them visible comes last.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from headsmith.errors import HeadsmithError
from headsmith.models.hub.client import Repo, connect, faults
from headsmith.models.hub.release import Release

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAIN = "main"
# What a head's files are called: of an earlier release none may stay beside this one's.
_OURS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*",
    "headsmith.json",
    "medusa_tree.json",
)


@dataclass(frozen=True, slots=True)
class Published:
    """Where a release is. `changed` is False where the Hub held it already."""

    url: str
    commit: str
    private: bool
    changed: bool


@dataclass(frozen=True, slots=True)
class Held:
    """What a revision of a repository holds: its commit, and a digest of each file. `own` is False
    for a branch that was only just made from another.
    """

    commit: str | None
    digests: dict[str, str]
    private: bool
    own: bool = True


def publish(release: Release, *, private: bool = True, force: bool = False) -> Published:
    """Make or reuse the repository and commit the release to its revision.

    Raises HeadsmithError when that revision holds other files of a head, unless `force`; and
    EnvironmentFault when the Hub cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api = connect()
    repo = release.repo
    branch = repo.revision or MAIN
    with faults(repo, "written"):
        held = _open(api, repo, branch, private)
        new = {name: path for name, path in release.files.items() if not _is_held(held, name, path)}
        stale = [name for name in held.digests if name not in release.files and _is_ours(name)]
        replaced = sorted({name for name in new if name in held.digests} | set(stale))
        if replaced and held.own and not force:
            raise HeadsmithError(
                f"the repository {repo.name} holds another {replaced[0]} in its revision {branch}; "
                "publish this one beside it with --revision NAME, or replace it with --force"
            )
        url = f"{api.endpoint}/{repo.name}"
        if not new and not stale:
            return Published(url, held.commit or "", held.private, changed=False)
        done = api.create_commit(
            repo.name,
            [
                *(CommitOperationAdd(name, str(path)) for name, path in sorted(new.items())),
                *(CommitOperationDelete(name, is_folder=False) for name in stale),
            ],
            commit_message="Publish a draft head with headsmith",
            revision=branch,
            # The Hub refuses if somebody was faster than this comparison.
            parent_commit=held.commit,
        )
    return Published(url, str(done.oid), held.private, changed=True)


def _open(api: HfApi, repo: Repo, branch: str, private: bool) -> Held:
    """The revision to commit to, made if it is not there."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = api.repo_info(repo.name)
    except RepositoryNotFoundError:
        api.create_repo(repo.name, private=private, exist_ok=True)
        info = api.repo_info(repo.name)
    first, own = info.sha, True
    if branch != MAIN:
        try:
            info = api.repo_info(repo.name, revision=branch)
        except RevisionNotFoundError:
            api.create_branch(repo.name, branch=branch, exist_ok=True)
            info = api.repo_info(repo.name, revision=branch)
        # A copy of main, made just now or by a push that did not come to its end.
        own = info.sha != first
    return Held(info.sha, _digests(api, repo, info.sha), bool(info.private), own)


def _digests(api: HfApi, repo: Repo, commit: str | None) -> dict[str, str]:
    """What git or LFS call the files of a commit."""
    from huggingface_hub import RepoFile

    found = api.list_repo_tree(repo.name, recursive=True, revision=commit)
    return {
        one.path: one.lfs.sha256 if one.lfs else one.blob_id
        for one in found
        if isinstance(one, RepoFile)
    }


def _is_held(held: Held, name: str, path: Path) -> bool:
    return held.digests.get(name) in (_sha256(path), _git_sha1(path))


def _is_ours(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _OURS)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _git_sha1(path: Path) -> str:
    """What git calls a file that it keeps itself."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
