"""Checks of config.json alone: keys that engines read differently, or drop without a word.

What each engine does with them: spec/engines.md 4, spec/eagle.md 1.1, 2.1, 5; spec/medusa.md 1.4.
"""

from __future__ import annotations

from collections.abc import Iterator

from headsmith.errors import HeadsmithError
from headsmith.models.doctor.checkpoint import AGAIN, Checkpoint
from headsmith.models.doctor.findings import Finding, error, note, warning
from headsmith.models.medusa_files import TREE_FILE, read_calibration

# A null here crashes an engine or its parser (spec/eagle.md 5.3, 5.6).
_NO_NULLS = ("target_hidden_size", "use_cache", "num_aux_hidden_states", "draft_vocab_size")
# Numbers of a config, where it has them.
_SIZES = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "num_aux_hidden_states",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "truncated_vocab_size",
    "max_position_embeddings",
    "num_heads",
)
# Read at the top level only; in eagle_config vLLM passes over them.
_TOP_LEVEL = ("fc_norm", "norm_output", "norm_before_residual")


def check_kinds(head: Checkpoint) -> Iterator[Finding]:
    """Whether the values are of the kinds that all other checks take them for."""
    sizes = [(key, value) for key, value in head.body.items() if key in _SIZES]
    wrong = [key for key, value in sizes if value is not None and type(value) is not int]
    if not isinstance(head.raw.get("eagle_config"), dict | None):
        wrong.append("eagle_config")
    elif not all(map(_whole_numbers, head.named_taps)):
        wrong.append("eagle_aux_hidden_state_layer_ids")
    for key in wrong:
        yield error(
            "keys",
            f"head {head.folder}: {key} in config.json is of the wrong kind; correct it or {AGAIN}",
        )
    for key in ("target", "head", "recipe"):
        if not isinstance(head.about.get(key, {}), dict | None):
            yield error(
                "record",
                f"head {head.folder}: {key} in headsmith.json is of the wrong kind; {AGAIN}",
            )


def _whole_numbers(value: object) -> bool:
    return value is None or isinstance(value, list) and all(type(one) is int for one in value)


def check_keys(head: Checkpoint) -> Iterator[Finding]:
    """The keys of an EAGLE-3 or a Medusa config."""
    if head.medusa:
        yield from _medusa_keys(head)
        yield from _tree(head)
        return
    yield from _nulls(head)
    yield from _tied(head)
    yield from _flags(head)
    yield from _window(head)


def check_taps(head: Checkpoint, layers: int | None) -> Iterator[Finding]:
    """Taps in range and numbered as each engine numbers them; `layers` is L."""
    if head.medusa:
        return
    top, nested = head.named_taps
    where = f"head {head.folder}"
    inner = None if nested is None else [tap + 1 for tap in nested]
    taps = top or nested
    if taps is None:
        return
    if layers is not None and any(not 0 <= tap <= layers for tap in taps):
        yield error(
            "taps",
            f"{where} reads taps {taps} and its target has only 0..{layers}; it was trained for a "
            "deeper target, or its taps are wrong in config.json",
        )
    elif layers in taps:
        yield warning(
            "taps",
            f"{where} reads tap {layers}, behind the last block, which SGLang never captures and "
            "vLLM takes before the final norm; serve it with vLLM only",
        )
    if top is None:
        yield warning(
            "taps",
            f"{where} names taps {nested} in eagle_config alone, where vLLM and SGLang number them "
            f"one apart; write them as vLLM counts at the top level and one less in eagle_config",
        )
    elif nested is None and layers is not None and taps != _defaults(layers):
        yield warning(
            "taps",
            f"{where} names taps {top} at the top level alone, which SGLang does not read; write "
            f"eagle_config with {[tap - 1 for tap in top]} for it",
        )
    elif inner is not None and inner != top:
        yield warning(
            "taps",
            f"{where} names taps {top} for vLLM and {nested} in eagle_config, which SGLang reads "
            f"as {inner}; write {[tap - 1 for tap in top]} there",
        )


def _defaults(layers: int) -> list[int]:
    return sorted((2, layers // 2, layers - 3))


def _nulls(head: Checkpoint) -> Iterator[Finding]:
    nulls = [key for key in _NO_NULLS if key in head.body and head.body[key] is None]
    if nulls and not head.speculators:
        yield error(
            "nulls",
            f"head {head.folder}: {nulls[0]} is null in config.json, on which an engine fails; "
            "remove the key",
        )


def _tied(head: Checkpoint) -> Iterator[Finding]:
    if head.body.get("tie_word_embeddings"):
        yield error(
            "tied",
            f"head {head.folder}: config.json says tie_word_embeddings, with which SGLang puts the "
            "target's embeddings in the place of the trained lm_head; set it to false, even for a "
            "tied target",
        )


def _flags(head: Checkpoint) -> Iterator[Finding]:
    where, raw = f"head {head.folder}", head.raw
    nested = raw.get("eagle_config") or {}
    for flag in _TOP_LEVEL:
        if flag in nested and bool(nested[flag]) != bool(raw.get(flag)):
            yield error(
                "flags",
                f"{where}: {flag} stands in eagle_config, where engines do not read it; move it to "
                "the top level of config.json",
            )
    if nested.get("use_aux_hidden_state") is False:
        yield error(
            "flags",
            f"{where}: eagle_config says use_aux_hidden_state false, with which vLLM drops fc "
            "without a word; set it to true",
        )
    if head.speculators and "norm_before_residual" not in raw:
        yield warning(
            "flags",
            f"{where}: norm_before_residual is not in config.json, which vLLM takes as true and "
            "the trainer's own class as false; write the value that it was trained with",
        )
    elif raw.get("norm_before_residual"):
        yield warning(
            "flags",
            f"{where} was made with norm_before_residual, which SGLang and TensorRT-LLM do not "
            "know and pass over; serve it with vLLM only",
        )
    if raw.get("fc_norm") and (raw.get("norm_before_fc") or nested.get("norm_before_fc")):
        yield warning(
            "flags",
            f"{where} sets fc_norm and norm_before_fc, of which vLLM applies both and TensorRT-LLM "
            "the first; serve it with vLLM only",
        )
    if bool(raw.get("fc_norm")) != bool(raw.get("norm_output")):
        yield note(
            "flags",
            f"{where} sets one of fc_norm and norm_output, half of what EAGLE-3.1 is; check that "
            "it was trained so",
        )


def _window(head: Checkpoint) -> Iterator[Finding]:
    types, size = head.body.get("layer_types"), head.body.get("sliding_window")
    asked = types[0] == "sliding_attention" if types else head.body.get("use_sliding_window")
    if size and asked:
        yield warning(
            "window",
            f"head {head.folder} attends to the last {size} tokens only, which SGLang does not "
            f"read from config.json; serve it there with --speculative-draft-window-size {size}",
        )


def _medusa_keys(head: Checkpoint) -> Iterator[Finding]:
    """vLLM renames every key with "num" and "heads" or "layers" in it; the last one wins."""
    for word, name in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        keys = [key for key in head.raw if "num" in key and word in key]
        if len(keys) > 1:
            other = next(key for key in keys if key != name)
            yield error(
                "keys",
                f"head {head.folder}: config.json has {' and '.join(keys)}, which vLLM takes for "
                f"one key; remove {other}",
            )


def _tree(head: Checkpoint) -> Iterator[Finding]:
    try:
        stored, heads = read_calibration(head.folder), head.raw.get("num_heads")
    except HeadsmithError as fault:
        yield error("tree", str(fault))
        return
    if stored is None or not isinstance(heads, int):
        return
    depth = max(map(len, stored.choices))
    if depth > heads:
        yield error(
            "tree",
            f"head {head.folder}: {TREE_FILE} goes {depth} drafts deep and there are {heads} "
            "heads; write it again with headsmith calibrate",
        )
