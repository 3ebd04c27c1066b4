"""What each engine takes from the config.json of an EAGLE-3 head, and from how it is launched.

Part of the check on the writer (see `reader_eagle`): the engines' own rules (spec/eagle.md 1.1,
2.1, 5.3-5.7), without a line of the writer's tables.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headsmith.errors import HeadsmithError


@dataclass(frozen=True, slots=True)
class Reading:
    """What an engine takes from the config, and from how it is launched.

    taps: states before these blocks. layer: prefix of the layer's tensors. flags: those that are
    on. own_table: whether it reads embed_tokens of the head.
    """

    body: dict[str, Any]
    taps: tuple[int, ...]
    layer: str
    flags: frozenset[str]
    draft_vocab: int
    target_width: int
    window: int | None
    own_table: bool


def _window_of(body: dict[str, Any]) -> int | None:
    kinds = body.get("layer_types") or ["full_attention"]
    return body["sliding_window"] if kinds[0] == "sliding_attention" else None


def _default(num_layers: int | None, folder: Path) -> list[int]:
    """What every engine takes for a head that names no taps."""
    if num_layers is None:
        raise HeadsmithError(
            f"the export {folder} names no taps; the number of the target's blocks is needed"
        )
    return [2, num_layers // 2, num_layers - 3]


def _flags(raw: dict[str, Any], *names: str) -> frozenset[str]:
    return frozenset(name for name in names if raw.get(name))


def _native(raw: dict[str, Any], folder: Path, **given: Any) -> Reading:
    """What the engines of the native layout read alike (spec/eagle.md 5.2)."""
    for key in ("draft_vocab_size", "architectures", "torch_dtype"):
        if not raw.get(key):
            raise HeadsmithError(f"the export {folder} has no {key} in its config.json")
    if raw.get("tie_word_embeddings") is not False:
        raise HeadsmithError(f"the export {folder} ties its lm_head, and SGLang would drop it")
    if raw["architectures"] != ["LlamaForCausalLMEagle3"]:
        raise HeadsmithError(f"the export {folder} names no architecture that engines know")
    if "target_hidden_size" in raw and raw["target_hidden_size"] is None:
        raise HeadsmithError(f"the export {folder} has a target_hidden_size of null")
    width = raw.get("target_hidden_size", raw["hidden_size"])
    values: dict[str, Any] = {
        "body": raw,
        "layer": "midlayer.",
        "draft_vocab": raw["draft_vocab_size"],
        "target_width": width,
        "window": None,
        "own_table": width != raw["hidden_size"],
    }
    return Reading(**{**values, **given, "taps": tuple(given["taps"])})


def _read_vllm(raw: dict[str, Any], folder: Path, num_layers: int | None) -> Reading:
    nested = raw.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    taps = raw.get(key) or nested.get(key) or _default(num_layers, folder)
    # vLLM counts the columns of fc by other keys than it chooses the taps by.
    count = raw.get("num_aux_hidden_states") or len(nested.get(key) or ()) or 3
    if count != len(taps):
        raise HeadsmithError(f"the export {folder} has {len(taps)} taps; vLLM would count {count}")
    if not nested.get("use_aux_hidden_state", True):
        raise HeadsmithError(f"the export {folder} switches its taps off")
    flags = _flags(raw, "fc_norm", "norm_output", "norm_before_residual")
    if nested.get("norm_before_fc", raw.get("norm_before_fc")):
        flags |= {"norm_before_fc"}
    return _native(
        raw, folder, taps=sorted(set(taps)), flags=flags, window=_window_of(raw), own_table=True
    )


def _read_sglang(raw: dict[str, Any], folder: Path, num_layers: int | None) -> Reading:
    nested = raw.get("eagle_config") or {}
    outputs = nested.get("eagle_aux_hidden_state_layer_ids")
    taps = _default(num_layers, folder) if outputs is None else [i + 1 for i in outputs]
    words = shlex.split((folder / "launch" / "sglang.sh").read_text(), comments=True)
    flag = "--speculative-draft-window-size"
    window = int(words[words.index(flag) + 1]) if flag in words else None
    flags = _flags(raw, "fc_norm", "norm_output", "norm_before_fc")
    return _native(raw, folder, taps=taps, flags=flags, window=window)


def _read_trtllm(raw: dict[str, Any], folder: Path, num_layers: int | None) -> Reading:
    nested = raw.get("eagle_config") or {}
    launched = yaml.safe_load((folder / "launch" / "trtllm.yaml").read_text())
    outputs = launched["speculative_config"].get("eagle3_layers_to_capture")
    taps = _default(num_layers, folder) if outputs is None else [i + 1 for i in sorted(outputs)]
    flags = _flags(raw, "fc_norm", "norm_output")
    if nested.get("return_hidden_post_norm"):
        flags |= {"norm_output"}
    if nested.get("norm_before_fc") and "fc_norm" not in flags:
        flags |= {"norm_before_fc"}
    return _native(raw, folder, taps=taps, flags=flags)


def _read_original(raw: dict[str, Any], folder: Path, num_layers: int | None) -> Reading:
    scaling = raw.get("rope_scaling")
    known = scaling is None or (
        set(scaling) == {"type", "factor"} and scaling["type"] in ("linear", "dynamic")
    )
    if not known:
        raise HeadsmithError(f"the export {folder} has a rope_scaling that the code cannot read")
    body = {**raw, "head_dim": raw["hidden_size"] // raw["num_attention_heads"]}
    taps = _default(num_layers, folder)
    # It reads the head's own table when the config names the target's width at all.
    own = "target_hidden_size" in raw
    return _native(raw, folder, taps=taps, flags=frozenset(), body=body, own_table=own)


def _read_speculators(raw: dict[str, Any], folder: Path, num_layers: int | None) -> Reading:
    body = raw["transformer_layer_config"]
    if raw["speculators_model_type"] != "eagle3" or body["model_type"] != "llama":
        raise HeadsmithError(f"the export {folder} is no EAGLE-3 head of speculators")
    proposal = raw["speculators_config"]["proposal_methods"][0]
    if proposal["speculative_tokens"] < 1 or not raw["speculators_config"]["verifier"]:
        raise HeadsmithError(f"the export {folder} names no depth or no target")
    taps = raw["eagle_aux_hidden_state_layer_ids"]
    if body.get("num_aux_hidden_states", 3) != len(taps):
        raise HeadsmithError(f"the export {folder} has another number of taps than vLLM counts")
    # Absent, this one is on for vLLM and off for the package, so it has to be there.
    assert isinstance(raw["norm_before_residual"], bool)
    return Reading(
        body=body,
        taps=tuple(taps),
        layer="layers.0.",
        flags=_flags(raw, "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"),
        draft_vocab=raw["draft_vocab_size"],
        target_width=body["hidden_size"],
        window=_window_of(body),
        own_table=True,
    )


READERS: dict[str, Callable[[dict[str, Any], Path, int | None], Reading]] = {
    "vllm": _read_vllm,
    "sglang": _read_sglang,
    "trtllm": _read_trtllm,
    "eagle": _read_original,
    "speculators": _read_speculators,
}
