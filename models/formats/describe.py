"""One description for each layout: which keys and tensors it has, and which heads it cannot hold.

The writer is driven by these tables alone. What reads an export back (`reader_eagle`,
`reader_medusa`) knows the engines' own rules and none of this.

Numbering of taps: tap i is the state before block i (spec/eagle.md 1.1), which is vLLM's and
speculators' id i, and the id i - 1 of SGLang and TensorRT-LLM, which count outputs of blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headsmith.models.eagle3_config import FLAGS

NAMES = ("vllm", "sglang", "trtllm", "speculators", "eagle", "tgi")
ENGINES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "speculators": "speculators",
    "eagle": "the original EAGLE code",
    "tgi": "Text Generation Inference",
}

# Keys of a decoder layer, in the order in which they are written (spec/eagle.md 5.2).
_LAYER = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "torch_dtype",
)
_NATIVE = (
    "architectures",
    *_LAYER,
    "draft_vocab_size",
    "rope_scaling",
    "attention_dropout",
    "use_cache",
    "initializer_range",
)
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_WINDOW = ("sliding_window", "use_sliding_window", "layer_types")
_TAPS = ("eagle_aux_hidden_state_layer_ids", "eagle_config")


@dataclass(frozen=True, slots=True)
class EagleFormat:
    """How an engine wants an EAGLE-3 head.

    layer: prefix of the decoder layer's tensors. keys: always in config.json. optional: there
    where the head has a value other than the default. body, body_optional: the same inside
    `transformer_layer_config`. nested: what goes into `eagle_config`. refused: what a head may
    have (see `fit.traits`) that this layout or its engine cannot hold, and why.
    """

    name: str
    refused: Mapping[str, str]
    layer: str = "midlayer."
    keys: tuple[str, ...] = _NATIVE
    optional: tuple[str, ...] = (*_IDS, "target_hidden_size")
    body: tuple[str, ...] = ()
    body_optional: tuple[str, ...] = ()
    nested: tuple[str, ...] = ("eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state")


@dataclass(frozen=True, slots=True)
class MedusaFormat:
    """How an engine wants Medusa heads.

    block, own: names of the tensors of layer j of head i, and of the lm_head of head i. borrows:
    whether the engine takes the target's lm_head where a head of one layer has none; a lm_head
    that is shared is otherwise stored for every head, or once as `shared` where that is named.
    """

    name: str
    file: str
    keys: tuple[str, ...]
    block: str
    own: str
    shared: str | None = None
    borrows: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)


_ONLY_VLLM = "only vLLM and the speculators layout know it"
_NO_31 = "that code knows EAGLE-3 and not EAGLE-3.1; export to vllm, sglang or trtllm"

EAGLE = {
    one.name: one
    for one in (
        EagleFormat(
            "vllm",
            refused={},
            optional=(
                *_IDS,
                *FLAGS,
                *_WINDOW,
                "target_hidden_size",
                *_TAPS,
                "num_aux_hidden_states",
            ),
        ),
        EagleFormat(
            "sglang",
            refused={
                "norm_before_residual": _ONLY_VLLM,
                "attention_bias": "its queries, keys and values have no bias",
                "mlp_bias": _ONLY_VLLM,
            },
            optional=(
                *_IDS,
                "fc_norm",
                "norm_output",
                "norm_before_fc",
                *_WINDOW,
                "target_hidden_size",
                *_TAPS,
            ),
        ),
        EagleFormat(
            "trtllm",
            refused={
                "norm_before_residual": _ONLY_VLLM,
                "mlp_bias": _ONLY_VLLM,
                "sliding_window": "its heads attend to everything",
                "two norms before fc": "it would apply fc_norm and drop norm_before_fc",
            },
            optional=(*_IDS, "fc_norm", "norm_output", "target_hidden_size", *_TAPS),
            nested=("eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_fc"),
        ),
        EagleFormat(
            "speculators",
            refused={
                "two norms before fc": "it refuses norm_before_fc together with fc_norm",
                "another width": "it wants a head as wide as its target",
            },
            layer="layers.0.",
            keys=(
                "architectures",
                "speculators_model_type",
                "speculators_version",
                "draft_vocab_size",
                "norm_before_residual",
                "norm_before_fc",
                "fc_norm",
                "norm_output",
                "target_hidden_size",
                "embed_requires_grad",
                "eagle_aux_hidden_state_layer_ids",
                "speculators_config",
            ),
            optional=(),
            body=_LAYER,
            body_optional=(*_IDS, "rope_scaling", *_WINDOW, "num_aux_hidden_states"),
        ),
        EagleFormat(
            "eagle",
            refused={
                "fc_norm": _NO_31,
                "norm_output": _NO_31,
                "norm_before_fc": _ONLY_VLLM,
                "norm_before_residual": _ONLY_VLLM,
                "attention_bias": "its queries, keys and values have no bias",
                "mlp_bias": "its MLP has no bias",
                "sliding_window": "its heads attend to everything",
                "other taps": "it always reads the default ones (2, L // 2, L - 3)",
                "rope scaling": "it knows no RoPE scaling but linear and dynamic",
                "head_dim": "it takes hidden_size / num_attention_heads for head_dim",
            },
        ),
    )
}

MEDUSA = {
    one.name: one
    for one in (
        MedusaFormat(
            "vllm",
            file="model.safetensors",
            keys=(
                "architectures",
                "model_type",
                "hidden_size",
                "vocab_size",
                "num_heads",
                "num_hidden_layers",
                "truncated_vocab_size",
                "original_lm_head",
                "medusa_fc_bias",
                "torch_dtype",
            ),
            block="blocks.{i}.layers.{j}.{part}",
            own="lm_heads.{i}.weight",
            shared="lm_head.weight",
        ),
        MedusaFormat(
            "trtllm",
            file="medusa_lm_head.safetensors",
            keys=(
                "base_model_name_or_path",
                "medusa_num_heads",
                "num_medusa_heads",
                "medusa_num_layers",
                "max_draft_len",
            ),
            block="{i}.{j}.linear.{part}",
            own="{i}.{layers}.weight",
            refused={"truncated": "it has no draft vocabulary for Medusa heads"},
        ),
        MedusaFormat(
            "tgi",
            file="medusa_lm_head.safetensors",
            # No `architectures`: with that key it would find no speculator (spec/medusa.md 1.4).
            keys=("base_model_name_or_path", "medusa_num_heads", "medusa_num_layers"),
            block="{i}.{j}.linear.{part}",
            own="{i}.{layers}.weight",
            borrows=True,
            refused={"truncated": "it has no draft vocabulary"},
        ),
    )
}

# Kinds of head that an engine does not know at all.
UNKNOWN = {
    ("tgi", "eagle"): "TGI drafts with Medusa heads and n-grams and knows no EAGLE head; export to "
    "vllm, sglang or trtllm",
    ("sglang", "medusa"): "SGLang knows no Medusa heads; export to vllm, trtllm or tgi",
    ("speculators", "medusa"): "the speculators layout has no Medusa heads; export to vllm, trtllm "
    "or tgi",
    (
        "eagle",
        "medusa",
    ): "the original EAGLE code drafts with EAGLE heads only; export Medusa heads "
    "to vllm, trtllm or tgi",
}
