"""What makes prepared data what it is: hashes of sources and tokenizers."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from headsmith.data.hub import hub_commit


def source_identity(
    source: str | Path, split: str | None = None, revision: str | None = None
) -> dict[str, Any]:
    """What a source is, wherever it lies: content hashes of files, or the commit of a Hub id."""
    path = Path(source).expanduser()
    if path.is_file():
        return {"file": _file_identity(path), "split": split}
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file())
        return {
            "folder": {str(f.relative_to(path)): _file_identity(f) for f in files},
            "split": split,
        }
    return {"hub": str(source), "commit": hub_commit(str(source), revision), "split": split}


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hash of a fast tokenizer: vocabulary, rules, added and special tokens; not its settings."""
    from tokenizers import Tokenizer

    backend = tokenizer.backend_tokenizer
    if backend.truncation or backend.padding:
        backend = Tokenizer.from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return sha256((backend.to_str() + json.dumps(special, sort_keys=True)).encode())


def _file_identity(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def name_of(source: str | Path) -> str:
    """A short, safe name for a source: `my data.v2.json` -> `my-data`."""
    name = Path(source).expanduser().resolve().name if Path(source).exists() else str(source)
    return re.sub(r"[^A-Za-z0-9]+", "-", name.split(".")[0]).strip("-").lower()[:40] or "data"
