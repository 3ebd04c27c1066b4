"""headsmith.json beside a checkpoint: whose head it is; a head is refused for a target that is not
its own (design.md).
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from headsmith.errors import HeadsmithError
from headsmith.models.target import Target

FILE = "headsmith.json"


def target_info(target: Target) -> dict[str, Any]:
    """The `target` entry of headsmith.json: where it came from and who it is."""
    return {
        "path": target.path,
        "revision": target.revision,
        "fingerprint": target.fingerprint(),
        "tokenizer": tokenizer_sha256(target),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
    }


def tokenizer_sha256(target: Target) -> str:
    """sha256 over the tokenizer and its chat template alone, to tell a mismatch's cause."""
    from headsmith.models.loading import tokenizer_bytes

    return f"sha256:{hashlib.sha256(tokenizer_bytes(target.tokenizer)).hexdigest()}"


def read_provenance(head: Path) -> dict[str, Any] | None:
    """The head's headsmith.json; None where others made the head and there is none."""
    path = head / FILE
    if not path.is_file():
        return None
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HeadsmithError(f"{path} is not valid JSON ({error}); it may be cut off") from error
    return about


def check_pair(target: Target, head: str | Path, allow_mismatch: bool = False) -> list[str]:
    """What speaks against using the head with this target, as warnings.

    Raises HeadsmithError with the first difference unless `allow_mismatch`; a width that does not
    fit is always refused, since nothing could run.
    """
    folder = Path(head)
    if not folder.is_dir():
        raise HeadsmithError(f"head {folder} does not exist; give the folder of a checkpoint")
    config = _config(folder)
    body = config.get("transformer_layer_config", config)
    width = config.get("target_hidden_size") or body.get("hidden_size")
    if width != target.hidden_size:
        raise HeadsmithError(
            f"head {folder} reads states of width {width}, the target {target.path} has "
            f"{target.hidden_size}; it was trained for another target"
        )
    found = _differences(target, folder, body)
    if found and not allow_mismatch:
        raise HeadsmithError(
            f"{found[0]}; give its own target, or --allow-mismatch to go on all the same"
        )
    return found


def _differences(target: Target, folder: Path, body: dict[str, Any]) -> list[str]:
    found = []
    if body.get("vocab_size") != target.vocab_size:
        found.append(
            f"head {folder} was made for a vocabulary of {body.get('vocab_size')} ids, "
            f"the target {target.path} has {target.vocab_size}"
        )
    about = read_provenance(folder)
    own = (about or {}).get("target") or {}
    if own.get("fingerprint") in (None, target.fingerprint()):
        return found
    if own.get("tokenizer") not in (None, tokenizer_sha256(target)):
        what = "another tokenizer or chat template"
    elif own.get("revision") != target.revision:
        what = f"revision {own.get('revision')} where this is {target.revision}"
    else:
        what = "other weights or another config"
    found.append(
        f"head {folder} was trained for {own.get('path')}, which is not {target.path}: {what}"
    )
    return found


def _config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HeadsmithError(f"{folder} is not a head: there is no config.json in it") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HeadsmithError(
            f"{folder / 'config.json'} is not valid JSON ({error}); it may be cut off"
        ) from error
    if not isinstance(config, dict):
        raise HeadsmithError(f"{folder} is not a head: its config.json holds no JSON object")
    return config
