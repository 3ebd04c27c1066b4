"""The files of a head as they are published: weights as safetensors, a card, and a record that
names the target as everybody can find it and no folder of this machine.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headsmith.errors import HeadsmithError
from headsmith.files import weights_sha256, write_atomic, write_json, write_text
from headsmith.models.doctor.checkpoint import Checkpoint
from headsmith.models.eagle3_config import Eagle3Config
from headsmith.models.hub.card import CardFacts, make_card
from headsmith.models.hub.client import Repo, parse_repo
from headsmith.models.hub.measured import gather
from headsmith.models.medusa_files import TREE_FILE
from headsmith.models.provenance import FILE
from headsmith.models.strict import read_tensors

CARD, CONFIG = "README.md", "config.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# Files of a head that go along where they are.
_MORE = (TREE_FILE, "DEPLOY.md", "LICENSE", "LICENSE.md", "LICENSE.txt")


@dataclass(frozen=True, slots=True)
class Release:
    """What to publish: the files by their names in the repository, and the card's text."""

    repo: Repo
    files: dict[str, Path]
    card: str


@dataclass(frozen=True, slots=True)
class ReleaseSettings:
    """What the user says of a head. `target` is its target's name on the Hub, if headsmith.json
    does not name it so; `results` are files of `headsmith eval`.
    """

    repo: Repo
    target: str | None = None
    results: list[Path] = field(default_factory=list)
    license: str | None = None
    data: str | None = None


def prepare(folder: Path, settings: ReleaseSettings, cautions: list[str], work: Path) -> Release:
    """The release of the head in `folder`; what is written for it goes to `work`.

    Raises HeadsmithError when the target's name is not known, or a result is not of this head.
    """
    head = Checkpoint.open(folder)
    own = (head.about.get("target") or {}).get("path")
    target = settings.target or own
    if not isinstance(target, str) or parse_repo(target) is None or Path(target).exists():
        raise HeadsmithError(
            f"head {folder} was trained for {own or 'a target that is not recorded'}, which is no "
            "name on the Hub; say which model it is with --base-model ORG/NAME"
        )
    digest = weights_sha256(folder)
    measured = gather(head.about, digest, settings.results)
    about = published(head.about, target)
    files = {CONFIG: folder / CONFIG, **_weights(folder, work)}
    files |= {name: folder / name for name in _MORE if (folder / name).is_file()}
    if about:
        files[FILE] = work / FILE
        write_json(files[FILE], about)
    measured.remarks = [_public(one, folder, settings.repo) for one in measured.remarks]
    facts = CardFacts(
        repo=settings.repo,
        target=target,
        kind=kind_of(head),
        config=head.raw,
        about=about,
        sha256=digest or "",
        measured=measured,
        cautions=[_public(one, folder, settings.repo) for one in cautions],
        license=settings.license,
        data=settings.data,
    )
    card = make_card(facts)
    files[CARD] = work / CARD
    write_text(files[CARD], card)
    return Release(settings.repo, files, card)


def published(about: dict[str, Any], target: str) -> dict[str, Any]:
    """headsmith.json for others: the target by its name on the Hub, no folders of this machine."""
    if not about:
        return {}
    out = copy.deepcopy(about)
    (out.get("recipe") or {}).pop("output", None)
    for place in (out.get("target"), (out.get("recipe") or {}).get("target")):
        if place and place.get("path") != target:
            place |= {"path": target, "path_in_training": place.get("path")}
    return _without_folders(out)


def kind_of(head: Checkpoint) -> str:
    """`eagle3`, `eagle3.1` or `medusa`, by its config."""
    if head.medusa:
        return "medusa"
    layers = (head.about.get("target") or {}).get("num_layers")
    taps = None if layers or any(head.named_taps) else (0, 1, 2)
    return Eagle3Config.from_json(head.raw, taps, layers).kind


def _weights(folder: Path, work: Path) -> dict[str, Path]:
    """The safetensors of the head, made from a pickle where there are none."""
    found = {path.name: path for pattern in _WEIGHTS for path in folder.glob(pattern)}
    if found:
        return found
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in read_tensors(folder).items()}
    file = work / "model.safetensors"
    write_atomic(file, lambda temporary: save_file(tensors, temporary, {"format": "pt"}))
    return {file.name: file}


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    if isinstance(value, str) and Path(value).expanduser().is_absolute():
        return Path(value).name
    return value


def _public(sentence: str, folder: Path, repo: Repo) -> str:
    """A sentence of ours without folders of this machine."""
    named = sentence.replace(str(folder), repo.name)
    return re.sub(r"(?<![\w/:<])(?:/[\w.@-]+)+", lambda path: Path(path[0]).name, named)
