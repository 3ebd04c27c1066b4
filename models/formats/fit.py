"""Whether a head fits a layout, and the tensors that it has there."""

from headsmith.models.eagle3_config import FLAGS, Eagle3Config
from headsmith.models.formats.describe import EAGLE, ENGINES, MEDUSA, UNKNOWN, MedusaFormat
from headsmith.models.medusa_files import MedusaConfig

DEFAULT_TAPS = 3


def traits(config: Eagle3Config) -> dict[str, str]:
    """What of a head some layouts cannot hold: the name of each trait, and words for it."""
    rope = str(config.rope.get("rope_type", "default"))
    own_dim = config.hidden_size // config.num_heads
    found = {
        **{flag: flag for flag in FLAGS if getattr(config, flag)},
        **{key: key for key in ("attention_bias", "mlp_bias") if getattr(config, key)},
    }
    if config.fc_norm and config.norm_before_fc:
        found["two norms before fc"] = "fc_norm and norm_before_fc"
    if config.sliding_window is not None:
        found["sliding_window"] = f"a sliding window of {config.sliding_window}"
    if config.target_hidden_size not in (None, config.hidden_size):
        found["another width"] = f"width {config.hidden_size} for {config.target_hidden_size}"
    if not config.default_taps or config.num_taps != DEFAULT_TAPS:
        found["other taps"] = f"taps {', '.join(map(str, config.taps))}"
    if rope not in ("default", "linear", "dynamic"):
        found["rope scaling"] = f"RoPE scaling {rope}"
    if config.head_dim != own_dim:
        found["head_dim"] = f"a head_dim of {config.head_dim} where {own_dim} is usual"
    return found


def refusal(name: str, config: Eagle3Config | MedusaConfig) -> str | None:
    """Why a head cannot be exported to the format `name`; None if it can."""
    if isinstance(config, MedusaConfig):
        if (name, "medusa") in UNKNOWN:
            return UNKNOWN[name, "medusa"]
        reason = MEDUSA[name].refused.get(config.lm_head)
        return reason and (
            f"{ENGINES[name]} cannot hold a lm_head over {config.draft_vocab_size} of "
            f"{config.vocab_size} ids: {reason}; export to vllm"
        )
    if (name, "eagle") in UNKNOWN:
        return UNKNOWN[name, "eagle"]
    for trait, words in traits(config).items():
        if trait in EAGLE[name].refused:
            return f"{ENGINES[name]} cannot hold a head with {words}: {EAGLE[name].refused[trait]}"
    return None


def eagle_tensors(config: Eagle3Config, layer: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a head without its vocabulary buffers and embedding
    (spec/eagle.md 5.1).
    """
    c, width = config, 2 * config.hidden_size
    taps = c.num_taps * c.target_width
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (c.hidden_size, taps),
        f"{layer}hidden_norm.weight": (c.hidden_size,),
        f"{layer}input_layernorm.weight": (c.hidden_size,),
        f"{layer}self_attn.q_proj.weight": (queries, width),
        f"{layer}self_attn.k_proj.weight": (keys, width),
        f"{layer}self_attn.v_proj.weight": (keys, width),
        f"{layer}self_attn.o_proj.weight": (c.hidden_size, queries),
        f"{layer}post_attention_layernorm.weight": (c.hidden_size,),
        f"{layer}mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        f"{layer}mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
        f"{layer}mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        "norm.weight": (c.hidden_size,),
        "lm_head.weight": (c.draft_vocab_size, c.hidden_size),
    }
    if c.attention_bias:
        shapes |= {
            f"{layer}self_attn.{part}_proj.bias": (size,)
            for part, size in (("q", queries), ("k", keys), ("v", keys))
        }
    if c.mlp_bias:
        shapes |= {
            f"{layer}mlp.{part}_proj.bias": (c.intermediate_size,) for part in ("gate", "up")
        }
        shapes[f"{layer}mlp.down_proj.bias"] = (c.hidden_size,)
    if c.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (c.target_width,) for i in range(c.num_taps)}
    if c.norm_before_fc:
        shapes["input_norm.weight"] = (taps,)
    return shapes


def medusa_tensors(
    config: MedusaConfig, layout: MedusaFormat
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensors of Medusa heads in a layout (spec/medusa.md 1.3): name -> (our name, shape)."""
    c = config
    square, rows = (c.hidden_size, c.hidden_size), (c.draft_vocab_size, c.hidden_size)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for i in range(c.num_heads):
        for j in range(c.num_layers):
            for part, shape in (("weight", square), ("bias", square[:1])):
                ours = f"blocks.{i}.layers.{j}.{part}"
                found[layout.block.format(i=i, j=j, part=part)] = (ours, shape)
    if c.lm_head != "private" and layout.shared is not None:
        found[layout.shared] = ("lm_head.weight", rows)
        if c.lm_head == "truncated":
            found["token_map"] = ("token_map", rows[:1])
    elif not is_borrowed(config, layout):
        for i in range(c.num_heads):
            ours = f"lm_heads.{i}.weight" if c.lm_head == "private" else "lm_head.weight"
            found[layout.own.format(i=i, layers=c.num_layers)] = (ours, rows)
    return found


def is_borrowed(config: MedusaConfig, layout: MedusaFormat) -> bool:
    """Whether the export holds no lm_head, since the engine takes the target's: TGI, which does so
    for heads of one layer only (spec/medusa.md 1.4).
    """
    return layout.borrows and config.lm_head == "shared" and config.num_layers == 1
