"""What all tests share: few threads, no network, and the real things that some of them need."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported. Tests are many small operations, which more threads only slow down.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """The embedded default target (or `$HEADSMITH_TEST_TARGET`), converted; skips if absent."""
    from headsmith.models import embedded

    given = os.environ.get("HEADSMITH_TEST_TARGET")
    folder = Path(given) if given else embedded.folder_of(embedded.DEFAULT)
    if not (folder / "config.json").is_file():
        pytest.skip(f"no target in {folder}: run `make target` or set HEADSMITH_TEST_TARGET")
    return folder


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference heads and prompts beside the repository (or `$HEADSMITH_SHARED`)."""
    folder = Path(os.environ.get("HEADSMITH_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no reference data in {folder}: set HEADSMITH_SHARED")
    return folder
