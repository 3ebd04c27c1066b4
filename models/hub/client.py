"""What both directions need of the Hub: names of repositories, the client, and its faults as one
sentence.

`HF_ENDPOINT` names another server than huggingface.co, `HF_TOKEN` the account.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headsmith.errors import EnvironmentFault, HeadsmithError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


class Repo(NamedTuple):
    """A repository, and the branch, tag or commit of it that is meant."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def parse_repo(text: str) -> Repo | None:
    """ORG/NAME or ORG/NAME@REVISION; None for what does not read so."""
    name, _, revision = text.partition("@")
    if re.fullmatch(_NAME, name) is None or ("@" in text and not revision):
        return None
    return Repo(name, revision or None)


def is_repo(text: str) -> bool:
    """Whether `text` means a repository: it reads like one and no file or folder is so called."""
    return parse_repo(text) is not None and not Path(text).exists()


def endpoint() -> str | None:
    """The server that is asked; None for the client's default."""
    return os.environ.get("HF_ENDPOINT") or None


def connect() -> HfApi:
    """The Hub's client; its progress bars are for terminals."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    from headsmith import __version__

    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi(endpoint=endpoint(), library_name="headsmith", library_version=__version__)


@contextmanager
def faults(repo: Repo, doing: str) -> Iterator[None]:
    """Within this block what goes wrong on the Hub becomes one sentence: `doing` is "read" or
    "written".
    """
    try:
        yield
    except (HeadsmithError, KeyboardInterrupt):
        raise
    except Exception as error:
        fault = _fault(repo, doing, error)
        if fault is None:
            raise
        raise fault from error


def _fault(repo: Repo, doing: str, error: Exception) -> HeadsmithError | None:
    """What went wrong, as a sentence; None for a bug of ours."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError
    from huggingface_hub.errors import RepositoryNotFoundError as NoRepo
    from huggingface_hub.errors import RevisionNotFoundError as NoRevision

    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    said = " ".join(str(causes[-1]).split())[:200].rstrip(".")
    cannot = f"the repository {repo} on the Hub cannot be {doing}"
    log_in = "log in with `hf auth login` or set HF_TOKEN to a token that may"
    for one in causes:
        if isinstance(one, GatedRepoError):
            return HeadsmithError(f"{cannot}: it asks for access; accept its terms on its page")
        if isinstance(one, NoRevision):
            return HeadsmithError(f"{cannot}: it has no revision {repo.revision}; check its name")
        if isinstance(one, NoRepo):
            here = f", and there is no folder {repo.name} here" if doing == "read" else ""
            return HeadsmithError(f"{cannot}: there is none of this name{here}, or {log_in} see it")
        if isinstance(one, HfHubHTTPError) and one.response.status_code in (401, 403):
            return HeadsmithError(f"{cannot}: this account may not; {log_in}")
        if isinstance(one, HfHubHTTPError) and one.response.status_code < 500:
            return HeadsmithError(f"{cannot} ({said}); check its name and your rights to it")
        if isinstance(one, HFValidationError):
            return HeadsmithError(f"{cannot} ({said}); check its name")
    network = ("httpx", "httpcore", "requests", "urllib3", "huggingface_hub", "hf_xet")
    if not any(
        isinstance(one, OSError) or type(one).__module__.startswith(network) for one in causes
    ):
        return None
    return EnvironmentFault(
        f"{cannot} ({said}); check the network, and run again: what is done is not done twice"
    )
