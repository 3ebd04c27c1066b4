"""A head's folder as it lies on disk, and the checks of its files that need no target.

Legend: L blocks of the target, V its ids, V_d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headsmith.errors import HeadsmithError
from headsmith.files import weights_sha256
from headsmith.models import eagle3_files, medusa_files
from headsmith.models.doctor.findings import Finding, error, note, warning
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.provenance import read_config, read_provenance

AGAIN = "export it again from the run that trained it"
_TAP_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(slots=True)
class Checkpoint:
    """What the files say. `head` is on the meta device, with the sizes of its config; it and the
    `tensors` are None when they cannot be read.
    """

    folder: Path
    raw: dict[str, Any]
    about: dict[str, Any]
    head: Eagle3Head | MedusaHead | None = None
    tensors: dict[str, Tensor] | None = None
    shared: Tensor | None = None
    draft_ids: Tensor | None = None

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """The two JSON files; HeadsmithError when the folder holds no head."""
        return cls(folder, read_config(folder), read_provenance(folder) or {})

    @property
    def medusa(self) -> bool:
        return self.raw.get("model_type") == medusa_files.MODEL_TYPE

    @property
    def speculators(self) -> bool:
        return "speculators_config" in self.raw or "speculators_model_type" in self.raw

    @property
    def body(self) -> dict[str, Any]:
        """The keys of the draft layer."""
        nested = self.raw.get("transformer_layer_config")
        return nested if self.speculators and isinstance(nested, dict) else self.raw

    @property
    def named_taps(self) -> tuple[list[Any] | None, list[Any] | None]:
        """Taps at the top level (vLLM's numbering) and in eagle_config (SGLang's, one less)."""
        nested = (self.raw.get("eagle_config") or {}).get(_TAP_IDS)
        return self.raw.get(_TAP_IDS) or None, nested or None

    def read(self, layers: int | None) -> None:
        """Read the tensors; HeadsmithError says what of them cannot be what the config says.

        `layers` is L, which gives the taps of a config that names none.
        """
        if self.medusa:
            medusa, tensors, ids, self.shared = medusa_files.read_checkpoint(self.folder)
            with torch.device("meta"):
                self.head = MedusaHead(medusa, ids)
        else:
            # Without a target the numbers of unnamed taps are unknown, but not how many.
            known = layers is not None or any(self.named_taps)
            count = self.raw.get("num_aux_hidden_states") or 3
            taps = None if known else tuple(range(count))
            eagle, tensors, ids = eagle3_files.read_checkpoint(self.folder, taps, layers)
            with torch.device("meta"):
                self.head = Eagle3Head(eagle, ids)
                if "embed_tokens.weight" in tensors or eagle.owns_embedding:
                    self.head.embed_tokens = nn.Embedding(eagle.vocab_size, eagle.hidden_size)
        self.tensors, self.draft_ids = tensors, ids


def check_files(head: Checkpoint, layers: int | None) -> Iterator[Finding]:
    """Reads the tensors; then whether they are those that config.json announces, and finite."""
    try:
        head.read(layers)
    except HeadsmithError as fault:
        yield error("checkpoint", f"{fault}; {AGAIN}")
        return
    assert head.head is not None and head.tensors is not None
    expected, found = head.head.state_dict(), head.tensors
    missing, unknown = sorted(expected.keys() - found), sorted(found.keys() - expected.keys())
    if missing:
        yield error(
            "tensors",
            f"head {head.folder} lacks {_listed(missing)}, which engines do not notice and fill "
            f"with anything; {AGAIN}",
        )
    if unknown:
        yield error(
            "tensors",
            f"head {head.folder} has {_listed(unknown)}, which its config does not announce, so "
            f"that engines drop or refuse it; set the flag that belongs to it or {AGAIN}",
        )
    for name in sorted(expected.keys() & found.keys()):
        if expected[name].shape != found[name].shape:
            yield error(
                "shapes",
                f"head {head.folder}: {name} is {list(found[name].shape)}, its config asks for "
                f"{list(expected[name].shape)}; correct config.json or {AGAIN}",
            )
    yield from _check_values(head, found)


def _check_values(head: Checkpoint, found: dict[str, Tensor]) -> Iterator[Finding]:
    matrices = [(name, one) for name, one in found.items() if one.is_floating_point()]
    poisoned = [name for name, one in matrices if not bool(torch.isfinite(one).all())]
    if poisoned:
        yield error(
            "finite",
            f"head {head.folder}: {_listed(poisoned)} holds NaN or infinity; the run that wrote it "
            "diverged, so take an earlier checkpoint",
        )
    # A block of zeros is a Medusa head that was not trained yet; elsewhere nothing gets through.
    zeros = [name for name, one in matrices if one.dim() > 1 and not bool(one.any())]
    if zeros:
        say = warning if head.medusa else error
        yield say(
            "trained",
            f"head {head.folder}: {_listed(zeros)} is all zeros, as before the first step of "
            "training; take a later checkpoint",
        )
    kinds = sorted({str(one.dtype).removeprefix("torch.") for _, one in matrices})
    said = head.body.get("torch_dtype", head.body.get("dtype"))
    if said is not None and kinds != [said]:
        yield warning(
            "dtype",
            f"head {head.folder} is stored in {', '.join(kinds)} and its config.json says {said}; "
            "correct torch_dtype, or engines cast it",
        )


def check_record(head: Checkpoint) -> Iterator[Finding]:
    """Whether config and weights are those that headsmith.json was written for."""
    if not head.about:
        yield note(
            "record",
            f"head {head.folder} has no headsmith.json, so nothing says which target it is for; "
            "compare its own card with the target",
        )
        return
    recorded = head.about.get("head") or {}
    digest = recorded.get("sha256")
    if digest is not None and digest != weights_sha256(head.folder):
        yield error(
            "record",
            f"head {head.folder}: its weights are not those that headsmith.json was written for; "
            "what it says of them is void, so copy the checkpoint again",
        )
    if head.head is None:
        return
    now = head.head.about()
    if not any(head.named_taps) and not (head.about.get("target") or {}).get("num_layers"):
        now.pop("taps")
    for key, value in now.items():
        if key in recorded and recorded[key] != value:
            yield error(
                "record",
                f"head {head.folder}: config.json says {key} {value} and it was trained with "
                f"{recorded[key]}; correct config.json",
            )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return names[0] + more
