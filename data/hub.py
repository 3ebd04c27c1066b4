"""Conversations from the Hub: the only place in this room that uses the network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from headsmith.data.notes import FILE_SUFFIXES, first_line
from headsmith.errors import EnvironmentFault, HeadsmithError


def is_hub_id(source: str | Path) -> bool:
    """Whether `source` reads as ORG/NAME on the Hub and not as a path, existing or mistyped."""
    looks = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(source)) is not None
    return looks and not str(source).endswith(FILE_SUFFIXES) and not Path(source).exists()


def hub_records(name: str, split: str, revision: str | None) -> Iterator[object]:
    """Rows of a split of a Hub data set, streamed."""
    import datasets

    try:
        # Streamed: the prepared rows are the copy worth keeping, and max_rows may need one shard.
        yield from datasets.load_dataset(name, split=split, revision=revision, streaming=True)
    except Exception as error:
        raise hub_fault(name, error) from error


def hub_commit(name: str, revision: str | None) -> str:
    """The commit that `revision` (the default branch if None) of a Hub data set stands for."""
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name, revision=revision).sha)
    except Exception as error:
        raise hub_fault(name, error) from error


def hub_fault(name: str, error: Exception) -> HeadsmithError:
    """One sentence for whatever kept a Hub data set from being read."""
    kind, text = type(error).__name__, str(error).lower()
    if "gated" in kind.lower() or "gated" in text or "401" in text or "403" in text:
        return HeadsmithError(
            f"the Hub data set {name} asks for access; accept its terms on its page and log in "
            "with `hf auth login` or set HF_TOKEN"
        )
    if kind in ("DatasetNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError"):
        return HeadsmithError(
            f"the Hub has no data set {name} (or no such revision), and there is no such path here"
        )
    if isinstance(error, OSError) or "Connect" in kind or "Timeout" in kind or "offline" in text:
        return EnvironmentFault(f"the Hub cannot be reached to read {name} ({first_line(error)})")
    return HeadsmithError(f"the Hub data set {name} cannot be read ({first_line(error)})")
