"""The body that an EAGLE-3 head gets by default: a Llama layer with the target's widths and RoPE.

Whatever the target's own layer looks like (experts, latent attention, several RoPE layouts), every
engine serves a Llama-shaped head (spec/eagle.md 1.2), so that is what its widths become here.
"""

from typing import Any

from headsmith.errors import HeadsmithError

DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
SIZES = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")


def body_sizes(config: Any, target_width: int, path: str, given: dict[str, int]) -> dict[str, Any]:
    """Sizes of a head for the target whose text config is `config` and whose states have
    `target_width`: those `given` (of SIZES), else the target's own. A `hidden_size` below the
    target's keeps the size of an attention head and scales the rest.

    Raises HeadsmithError for a head wider than its target.
    """
    unknown = set(given) - set(SIZES)
    assert not unknown, f"no size of a head: {unknown}"
    hidden = given.get("hidden_size", target_width)
    if hidden > target_width:
        raise HeadsmithError(
            f"head.hidden_size {hidden} is above the {target_width} of the target {path}: a head "
            "has its target's width or less"
        )
    share = hidden / target_width
    heads_there = config.num_attention_heads
    heads = given.get("num_heads") or _divisor(hidden, max(1, round(heads_there * share)))
    groups_there = getattr(config, "num_key_value_heads", None) or heads_there
    own = getattr(config, "intermediate_size", None) or 4 * target_width
    return {
        "hidden_size": hidden,
        "target_hidden_size": None if hidden == target_width else target_width,
        "intermediate_size": given.get("intermediate_size") or _multiple(own * share, own),
        "num_heads": heads,
        "num_kv_heads": given.get("num_kv_heads") or _divisor(heads, groups_there),
        "head_dim": given.get("head_dim") or _head_dim(config, target_width),
    }


def body_rope(config: Any) -> dict[str, Any]:
    """The target's RoPE as a Llama layer can have it: of several layouts that of full
    attention, all dimensions rotated. Targets without one give the default.
    """
    rope = dict(getattr(config, "rope_parameters", None) or DEFAULT_ROPE)
    if "rope_type" not in rope:
        # One layout for each type of layer (Gemma 3); the head attends to everything.
        layouts = {kind: layout for kind, layout in rope.items() if isinstance(layout, dict)}
        first = next(iter(layouts.values()), DEFAULT_ROPE)
        rope = dict(layouts.get("full_attention") or first)
    rope.pop("partial_rotary_factor", None)
    if rope.get("rope_type") == "longrope":
        # Its factors are made for one head size and switch with the length of the input.
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    return DEFAULT_ROPE | {key: value for key, value in rope.items() if value is not None}


def _head_dim(config: Any, target_width: int) -> int:
    """Latent attention (MLA) calls its rotary part `head_dim`; the size of its values is what a
    plain attention head has.
    """
    if getattr(config, "kv_lora_rank", None) is not None:
        return int(config.v_head_dim)
    return getattr(config, "head_dim", None) or target_width // config.num_attention_heads


def _multiple(size: float, whole: int) -> int:
    """`size` up to a multiple of 8, which kernels like; the target's own size as it is."""
    return whole if size == whole else -(-int(size) // 8) * 8


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)
