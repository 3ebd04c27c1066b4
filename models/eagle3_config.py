"""The configuration of an EAGLE-3 head, read from the native and the speculators layout, written in
the native one.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headsmith.errors import HeadsmithError
from headsmith.models.eagle3_shape import body_rope, body_sizes

if TYPE_CHECKING:
    from headsmith.models.target import Target

FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
# The flags that each kind of head sets (spec/eagle.md 2.1). All others are off unless a checkpoint
# of somebody else sets them: in the class, in recipes and on the command line alike.
KINDS: dict[str, tuple[str, ...]] = {"eagle3": (), "eagle3.1": ("fc_norm", "norm_output")}


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Widths, flags and taps of a head; `vocab_size` is the target's. See spec/eagle.md 5.2 for the
    keys.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    default_taps: bool = True
    target_hidden_size: int | None = None
    rms_norm_eps: float = 1e-5
    rope: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 2048
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if not self.taps or list(self.taps) != sorted(set(self.taps)):
            raise HeadsmithError(
                f"taps {list(self.taps)} must be ascending and distinct: fc's columns follow them"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise HeadsmithError(
                f"draft vocabulary of {self.draft_vocab_size} ids does not fit "
                f"the target's {self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise HeadsmithError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.hidden_size % self.num_heads:
            # transformers refuses such a config.json, and engines read it through transformers.
            raise HeadsmithError(
                f"{self.num_heads} attention heads do not divide a width of {self.hidden_size}, "
                "as a Llama's config must"
            )
        if self.head_dim % 2:
            raise HeadsmithError(
                f"a head_dim of {self.head_dim} is odd, and RoPE turns dimensions in pairs"
            )

    @property
    def kind(self) -> str:
        """The kind that these flags make: the last of KINDS whose flags are all set."""
        return [kind for kind, flags in KINDS.items() if all(getattr(self, f) for f in flags)][-1]

    @property
    def num_taps(self) -> int:
        return len(self.taps)

    @property
    def target_width(self) -> int:
        """Width of each tap."""
        return self.target_hidden_size or self.hidden_size

    @property
    def owns_embedding(self) -> bool:
        """Whether the target's embeddings do not fit, so that the head ships a table of its own:
        engines read it when the widths differ (spec/eagle.md 5.5, 5.6).
        """
        return self.target_width != self.hidden_size

    @classmethod
    def for_target(
        cls,
        target: "Target",
        draft_vocab_size: int,
        *,
        taps: tuple[int, ...] | None = None,
        fc_norm: bool = False,
        norm_output: bool = False,
        **sizes: int,
    ) -> "Eagle3Config":
        """A Llama-shaped head with the target's widths, eps and RoPE; `sizes` may name others
        (models/eagle3_shape.py).
        """
        c = target.config
        chosen = target.default_taps() if taps is None else tuple(taps)
        body = body_sizes(c, target.hidden_size, target.path, sizes)
        eps = getattr(c, "rms_norm_eps", None) or getattr(c, "layer_norm_eps", None) or 1e-5
        return cls(
            **body,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            taps=chosen,
            default_taps=chosen == _default_taps(target.num_layers),
            rms_norm_eps=eps,
            rope=body_rope(c),
            max_position_embeddings=target.max_context,
            fc_norm=fc_norm,
            norm_output=norm_output,
            initializer_range=getattr(c, "initializer_range", 0.02),
            bos_token_id=getattr(c, "bos_token_id", None),
            eos_token_id=getattr(c, "eos_token_id", None),
            pad_token_id=getattr(c, "pad_token_id", None),
        )

    @classmethod
    def from_json(
        cls, raw: dict[str, Any], taps: tuple[int, ...] | None, num_target_layers: int | None
    ) -> "Eagle3Config":
        """Read a config.json of the native or the speculators layout (spec/eagle.md 5.2, 5.4)."""
        speculators = "speculators_config" in raw or "speculators_model_type" in raw
        body: dict[str, Any] = raw.get("transformer_layer_config", raw) if speculators else raw
        if body.get("num_hidden_layers", 1) != 1:
            raise HeadsmithError(
                f"a head of {body['num_hidden_layers']} layers is not supported; only one layer is"
            )
        if body.get("model_type", "llama") != "llama":
            raise HeadsmithError(
                f"a head of model type {body['model_type']} is not supported; only llama is"
            )
        try:
            hidden, heads = body["hidden_size"], body["num_attention_heads"]
            named = taps or _named_taps(raw)
            config = cls(
                hidden_size=hidden,
                intermediate_size=body["intermediate_size"],
                num_heads=heads,
                num_kv_heads=body.get("num_key_value_heads") or heads,
                head_dim=body.get("head_dim") or hidden // heads,
                vocab_size=body["vocab_size"],
                draft_vocab_size=raw.get("draft_vocab_size") or body["vocab_size"],
                taps=named or _default_taps(num_target_layers),
                default_taps=named in (None, _default_taps(num_target_layers, strict=False)),
                target_hidden_size=raw.get("target_hidden_size"),
                rms_norm_eps=body.get("rms_norm_eps", 1e-6),
                rope=_rope(body),
                max_position_embeddings=body.get("max_position_embeddings", 2048),
                attention_bias=bool(body.get("attention_bias", False)),
                mlp_bias=bool(body.get("mlp_bias", False)),
                sliding_window=_window(body),
                initializer_range=body.get("initializer_range", 0.02),
                bos_token_id=body.get("bos_token_id"),
                eos_token_id=body.get("eos_token_id"),
                pad_token_id=body.get("pad_token_id"),
            )
        except KeyError as error:
            raise HeadsmithError(
                f"its config.json has no {error.args[0]}: not an EAGLE-3 head"
            ) from error
        nested = raw.get("eagle_config") or {}
        # vLLM's reading: a speculators config without the key means True, a native one False
        # (spec/engines.md 4).
        flags: dict[str, Any] = {
            flag: bool(raw.get(flag, speculators and flag == "norm_before_residual"))
            for flag in FLAGS
        }
        flags["norm_before_fc"] = bool(nested.get("norm_before_fc", flags["norm_before_fc"]))
        # Other names for the flags of EAGLE-3.1: TensorRT-LLM's and an older one of SGLang.
        flags["norm_output"] |= bool(nested.get("return_hidden_post_norm"))
        flags["fc_norm"] |= bool(raw.get("use_aux_norm"))
        return replace(config, **flags)

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The native config.json that vLLM, SGLang, TensorRT-LLM and the original code read alike
        (spec 5.2).
        """
        rope = dict(self.rope)
        kind, theta = rope.pop("rope_type", "default"), rope.pop("rope_theta", 10000.0)
        out: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "head_dim": self.head_dim,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "num_hidden_layers": 1,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": theta,
            "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope},
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "attention_dropout": 0.0,
            # False even for a tied target: SGLang would drop the trained lm_head.
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
            "use_cache": True,
            "initializer_range": self.initializer_range,
        }
        ids = {k: getattr(self, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        out |= {key: value for key, value in ids.items() if value is not None}
        out |= {flag: True for flag in FLAGS if getattr(self, flag)}
        # A null here crashes vLLM and SGLang (spec 5.3).
        if self.target_hidden_size is not None:
            out["target_hidden_size"] = self.target_hidden_size
        if self.sliding_window is not None:
            out |= {
                "sliding_window": self.sliding_window,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"],
            }
        if not self.default_taps:
            out["eagle_aux_hidden_state_layer_ids"] = list(self.taps)
            out["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps],
                "use_aux_hidden_state": True,
            }
        if self.num_taps != 3:
            out["num_aux_hidden_states"] = self.num_taps
        return out


def _named_taps(raw: dict[str, Any]) -> tuple[int, ...] | None:
    """Taps in vLLM's numbering: top level first, else eagle_config (spec/eagle.md 1.1)."""
    nested = raw.get("eagle_config") or {}
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or nested.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    return tuple(ids) if ids else None


def _default_taps(num_target_layers: int | None, strict: bool = True) -> tuple[int, ...]:
    if num_target_layers is None:
        if not strict:
            return ()
        raise HeadsmithError(
            "its config names no taps; the number of the target's blocks is needed"
        )
    return tuple(sorted((2, num_target_layers // 2, num_target_layers - 3)))


def _rope(body: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, or rope_theta and rope_scaling of before."""
    if body.get("rope_parameters"):
        return {"rope_type": "default", **body["rope_parameters"]}
    scaling = dict(body.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    return {"rope_type": kind, "rope_theta": body.get("rope_theta", 10000.0), **scaling}


def _window(body: dict[str, Any]) -> int | None:
    """The draft layer's sliding window, when its layer type asks for one."""
    types = body.get("layer_types") or []
    wants = types[0] == "sliding_attention" if types else bool(body.get("use_sliding_window"))
    return body.get("sliding_window") if wants else None
