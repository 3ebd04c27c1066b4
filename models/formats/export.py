"""Export a head: written, given its launch configs, read back and compared, then renamed into
place.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headsmith import __version__
from headsmith.errors import HeadsmithError
from headsmith.files import atomic_folder, weights_sha256, write_json, write_text
from headsmith.models.formats.check import Checked, check_export
from headsmith.models.formats.deploy import deploy_text
from headsmith.models.formats.describe import ENGINES
from headsmith.models.formats.facts import Facts, read_facts
from headsmith.models.formats.fit import refusal
from headsmith.models.formats.launch import launch_files
from headsmith.models.formats.write import write_head
from headsmith.models.heads import Head, read_head
from headsmith.models.medusa import MedusaHead
from headsmith.models.provenance import FILE, read_provenance
from headsmith.models.strict import read_tensors

# Engines that take the target's embeddings for a head of the target's width, whatever it ships.
_REPLACES_EMBEDDING = ("sglang", "trtllm", "eagle")


@dataclass(slots=True)
class Export:
    """What was written where, and what the check found."""

    folder: Path
    name: str
    facts: Facts
    checked: Checked
    files: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def export(
    head: str | Path,
    name: str,
    out: str | Path,
    *,
    target: str | None = None,
    serve_as: str | None = None,
    result: str | Path | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Export:
    """Write the head in the folder `head` to the folder `out` as the engine `name` wants it.

    target: where headsmith.json names none. serve_as: the name under which the engine finds the
    target. result: a result.json that measured this head; without one, the validation of its run
    counts. dtype: of the weights, else the one they are stored in.

    Raises HeadsmithError, and leaves `out` as it was, if the engine cannot hold the head, or the
    export read back drafts anything else than the head.
    """
    head, out = Path(head), Path(out)
    _check_place(head, out, overwrite)
    facts = read_facts(head, target, serve_as, result)
    loaded = _read(head, facts)
    why_not = refusal(name, loaded.config)
    if why_not is not None:
        raise HeadsmithError(f"head {head} cannot be exported to {name}: {why_not}")
    kept = dtype or stored_dtype(read_tensors(head))
    warnings = list(_warnings(loaded, name, facts))
    with atomic_folder(out) as folder:
        write_head(loaded, name, folder, facts, kept)
        files = launch_files(name, loaded.config, facts, out.as_posix())
        for file, text in files.items():
            write_text(folder / "launch" / file, text)
        checked = check_export(loaded, folder, name, facts.num_layers, kept)
        short = str(kept).removeprefix("torch.")
        about = loaded.about()
        text = deploy_text(
            name, loaded.config, about, facts, sorted(files), checked, short, warnings
        )
        write_text(folder / "DEPLOY.md", text)
        write_json(folder / FILE, _provenance(head, folder, about, name, checked))
    return Export(out, name, facts, checked, sorted(files), warnings)


def stored_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """The narrowest dtype that holds all floating tensors of a checkpoint without loss."""
    kinds = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    found = kinds[0] if kinds else torch.float32
    for kind in kinds[1:]:
        found = torch.promote_types(found, kind)
    return found


def _check_place(head: Path, out: Path, overwrite: bool) -> None:
    if not (head / "config.json").is_file():
        raise HeadsmithError(f"{head} is not a head: there is no config.json in it")
    if out.resolve() == head.resolve() or out.resolve() in head.resolve().parents:
        raise HeadsmithError(f"{out} holds the head itself; give another folder for the export")
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
        raise HeadsmithError(f"{out} is there already; give another --out, or --overwrite")


def _read(head: Path, facts: Facts) -> Head:
    try:
        return read_head(head, facts.num_layers)
    except HeadsmithError as error:
        if facts.num_layers is None and "number of the target's blocks" in str(error):
            raise HeadsmithError(
                f"head {head} names no taps, and how many blocks its target has is not known; give "
                "the folder of the target with --target"
            ) from error
        raise


def _warnings(head: Head, name: str, facts: Facts) -> list[str]:
    from headsmith.models.embedded import SOURCES

    found = []
    if facts.serve_as in SOURCES:
        found.append(
            f"{facts.serve_as} is headsmith's own name for a target that it converts; an engine "
            f"needs its folder, which `headsmith target {facts.serve_as}` prints: give it in "
            "TARGET, or export with --serve-as"
        )
    if facts.measured is None:
        found.append(f"the draft shape {facts.draft} was not measured; run headsmith eval")
    if isinstance(head, MedusaHead):
        if name == "vllm" and head.config.lm_head == "truncated":
            found.append(
                "vLLM 0.32.0 refuses a truncated Medusa vocabulary (its loader takes token_map for "
                "a tensor that is missing); for it, train the head with head.lm_head shared"
            )
        return found
    if head.embed_tokens is not None and not head.config.owns_embedding:
        if name in _REPLACES_EMBEDDING:
            found.append(
                f"the head ships embed_tokens of its own, and {ENGINES[name]} takes the target's "
                "instead; that is the same only if the head's were never trained"
            )
    elif name == "eagle" and not head.config.owns_embedding:
        found.append(
            "the original code reads the embeddings through the target's "
            "model.safetensors.index.json, which a target of a single file does not have"
        )
    if facts.max_context and head.config.max_position_embeddings < facts.max_context:
        found.append(
            f"the head is made for {head.config.max_position_embeddings} positions and the target "
            f"for {facts.max_context}; limit the context of the server, or SGLang refuses to start"
        )
    return found


def _provenance(
    head: Path, folder: Path, about: dict[str, Any], name: str, checked: Checked
) -> dict[str, Any]:
    """The head's headsmith.json with the hash of these weights and what the export was made of."""
    known = copy.deepcopy(read_provenance(head)) or {"schema": "headsmith.head/1"}
    own = known.get("head") or {}
    known["head"] = {**own, **about, "sha256": weights_sha256(folder)}
    known["export"] = {
        "to": name,
        "headsmith": __version__,
        "from_sha256": weights_sha256(head),
        "drafts_compared": checked.drafts,
        "drafts_equal": checked.equal,
    }
    return known
