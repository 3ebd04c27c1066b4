"""headsmith.json beside a checkpoint: whose head it is; a head is refused for a target that is not
its own (design.md).
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headsmith.errors import HeadsmithError
from headsmith.models.identity import Identity, related
from headsmith.models.loading import locate
from headsmith.models.target import Target

FILE = "headsmith.json"
ITS_OWN = "give its own target, or --allow-mismatch to go on all the same"


def target_info(target: Target) -> dict[str, Any]:
    """The `target` entry of headsmith.json: where it came from and who it is."""
    return asdict(Identity.of(target))


def read_provenance(head: Path) -> dict[str, Any] | None:
    """The head's headsmith.json; None where others made the head and there is none."""
    path = head / FILE
    if not path.is_file():
        return None
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HeadsmithError(f"{path} is not valid JSON ({error}); it may be cut off") from error
    if not isinstance(about, dict):
        raise HeadsmithError(f"{path} holds no JSON object; it was not written for a head")
    return about


def own_target(head: Path) -> tuple[str | None, str | None]:
    """Path and revision of the head's own target, if this machine has it: (None, None) where it is
    not recorded, not here, or on the Hub.
    """
    own = (read_provenance(head) or {}).get("target") or {}
    path = own.get("path")
    if not isinstance(path, str):
        return None, None
    try:
        place, _ = locate(path)
    except HeadsmithError:
        return None, None
    return (path, own.get("revision")) if Path(place).is_dir() else (None, None)


def check_pair(target: Target, head: str | Path, allow_mismatch: bool = False) -> list[str]:
    """What speaks against using the head with this target, as warnings.

    Raises HeadsmithError with the first difference unless `allow_mismatch`; a width that does not
    fit is always refused, since nothing could run.
    """
    folder = Path(head)
    if not folder.is_dir():
        raise HeadsmithError(f"head {folder} does not exist; give the folder of a checkpoint")
    identity = Identity.of(target)
    other_width = width_difference(identity, folder)
    if other_width:
        raise HeadsmithError(other_width)
    found = differences(identity, folder)
    if found and not allow_mismatch:
        raise HeadsmithError(f"{found[0]}; {ITS_OWN}")
    return found


def width_difference(target: Identity, folder: Path) -> str | None:
    """What is wrong with the width of the states that the head in `folder` reads, if anything."""
    config = read_config(folder)
    body = config.get("transformer_layer_config", config)
    width = config.get("target_hidden_size") or body.get("hidden_size")
    if width == target.hidden_size:
        return None
    return (
        f"head {folder} reads states of width {width}, the target {target.path} has "
        f"{target.hidden_size}; it was trained for another target"
    )


def differences(target: Identity, folder: Path, successor: bool = False) -> list[str]:
    """How the target is not the one that the head in `folder` was trained for. `successor`: it
    says itself that it was made from that one.
    """
    found = []
    config = read_config(folder)
    vocabulary = config.get("transformer_layer_config", config).get("vocab_size")
    if vocabulary != target.vocab_size:
        found.append(
            f"head {folder} was made for a vocabulary of {vocabulary} ids, "
            f"the target {target.path} has {target.vocab_size}"
        )
    own = (read_provenance(folder) or {}).get("target") or {}
    what = _what_differs(target, own, successor)
    if what is not None:
        found.append(
            f"head {folder} was trained for {own.get('path')}, which is not {target.path}: {what}"
        )
    return found


def _what_differs(target: Identity, own: dict[str, Any], successor: bool) -> str | None:
    """The difference between a target and the recorded one, by what is known of both."""
    if own.get("fingerprint") in (None, target.fingerprint):
        return None
    what = None
    if own.get("tokenizer") not in (None, target.tokenizer):
        if "chat_template" not in own:
            what = "another tokenizer or chat template"
        else:
            same = own["chat_template"] == target.chat_template
            what = "another tokenizer" if same else "another chat template"
    elif own.get("revision") != target.revision:
        what = f"revision {own.get('revision')} where this is {target.revision}"
    elif target.fingerprint is not None:
        what = "other weights or another config"
    if what is not None and (successor or related(own.get("sketch"), target.sketch)):
        return f"{what}, as a post-trained successor of it has, whose text the head drafts worse"
    return what


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of the head in `folder`."""
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
