"""Write a head in a layout, as `describe` says."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headsmith.files import write_atomic, write_json
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.eagle3_config import FLAGS, Eagle3Config
from headsmith.models.formats.describe import EAGLE, MEDUSA, EagleFormat, MedusaFormat
from headsmith.models.formats.facts import Facts
from headsmith.models.formats.fit import eagle_tensors, is_borrowed, medusa_tensors
from headsmith.models.heads import Head
from headsmith.models.medusa import MedusaHead

# The release of speculators whose layout is written.
SPECULATORS_VERSION = "0.9.0"


def write_head(head: Head, name: str, folder: Path, facts: Facts, dtype: torch.dtype) -> None:
    """Write weights and config.json of `head` in the layout `name`, which it must fit, into
    `folder`.
    """
    if isinstance(head, MedusaHead):
        config, tensors = _medusa(head, MEDUSA[name], facts, dtype)
        file = MEDUSA[name].file
    else:
        config, tensors = _eagle(head, EAGLE[name], facts, dtype)
        file = "model.safetensors"
    write_atomic(folder / file, lambda path: save_file(tensors, path, {"format": "pt"}))
    write_json(folder / "config.json", config)


def _eagle(
    head: Eagle3Head, layout: EagleFormat, facts: Facts, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = head.config
    own = {name.replace("midlayer.", layout.layer): t for name, t in head.state_dict().items()}
    tensors = {}
    for name, shape in eagle_tensors(config, layout.layer).items():
        assert own[name].shape == shape, name
        tensors[name] = _stored(own[name], dtype)
    if head.embed_tokens is not None:
        tensors["embed_tokens.weight"] = _stored(head.embed_tokens.weight, dtype)
    if config.draft_vocab_size != config.vocab_size:
        ids = head.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    values = _eagle_values(config, layout, facts, str(dtype).removeprefix("torch."))
    out = _chosen(values, layout.keys, layout.optional)
    if layout.body:
        out["transformer_layer_config"] = _chosen(values, layout.body, layout.body_optional)
    return out, tensors


def _eagle_values(
    config: Eagle3Config, layout: EagleFormat, facts: Facts, dtype: str
) -> dict[str, Any]:
    """Every value that a config.json of this layout may hold, by key."""
    values = config.to_json(dtype)
    nested = values.pop("eagle_config", {})
    if config.norm_before_fc:
        nested["norm_before_fc"] = True
    nested = {key: value for key, value in nested.items() if key in layout.nested}
    if nested:
        values["eagle_config"] = nested
    if layout.name == "eagle" and values["rope_scaling"]:
        scaling = values["rope_scaling"]
        values["rope_scaling"] = {"type": scaling["rope_type"], "factor": scaling["factor"]}
    if layout.name == "speculators":
        if values["rope_scaling"] is None:
            del values["rope_scaling"]
        values |= {flag: getattr(config, flag) for flag in FLAGS}
        values |= _speculators_values(config, facts)
    return values


def _speculators_values(config: Eagle3Config, facts: Facts) -> dict[str, Any]:
    """What only the speculators layout has (spec/eagle.md 5.4)."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": facts.shape.depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": config.target_hidden_size,
        "embed_requires_grad": False,
        # Always named here, for the package counts the columns of fc by them.
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": facts.serve_as,
                "architectures": list(facts.architectures),
            },
        },
    }


def _chosen(
    values: dict[str, Any], keys: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, Any]:
    """Those values in the order of the tables; a key of `keys` must have one."""
    chosen = {key: values[key] for key in keys}
    # A null where none is expected crashes vLLM, SGLang or TensorRT-LLM (spec/eagle.md 5.3, 5.6).
    return chosen | {key: values[key] for key in optional if values.get(key) is not None}


def _medusa(
    head: MedusaHead, layout: MedusaFormat, facts: Facts, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = head.config
    own = {**head.state_dict(), "token_map": head.draft_ids}
    if config.lm_head == "shared":
        assert head.shared is not None, "a head of no target cannot be exported"
        own["lm_head.weight"] = head.shared
    tensors = {}
    for name, (ours, shape) in medusa_tensors(config, layout).items():
        assert own[ours].shape == shape, name
        tensors[name] = _stored(own[ours], torch.int64 if name == "token_map" else dtype)
    values = config.to_json(str(dtype).removeprefix("torch.")) | {
        "base_model_name_or_path": facts.serve_as,
        "medusa_num_heads": config.num_heads,
        "num_medusa_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "max_draft_len": facts.shape.nodes,
    }
    # Purely informative, and only where the heads borrow the target's lm_head (spec/medusa.md 1.5).
    version = {"version": "2"} if is_borrowed(config, layout) else {}
    return {key: values[key] for key in layout.keys} | version, tensors


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy: safetensors refuses storage that two tensors share, as one lm_head for all would."""
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()
