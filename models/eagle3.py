"""The EAGLE-3 draft head (spec/eagle.md 1, 2): one decoder layer over [embedding ; fused taps].

Row i takes the embedding of x[i+1] and the taps of x[i] and predicts x[i+2]. The head proposes ids
of its draft vocabulary; everything that enters or leaves it is a target id. EAGLE-3.1 is the same
module with `fc_norm` (a norm per tap before `fc`) and `norm_output` (the normalised state is fed
back). Tensor names are those of the native checkpoint.

Shapes: n rows, m taps, H_t target width, H head width, h heads, g key/value heads, d head size, V_d
draft vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headsmith.errors import HeadsmithError
from headsmith.models.eagle3_config import FLAGS, Eagle3Config
from headsmith.models.eagle3_files import read_checkpoint, write_checkpoint
from headsmith.models.eagle3_init import initialise, narrowed
from headsmith.models.products import Linear
from headsmith.models.strict import check_finite, check_shape, load_strictly
from headsmith.models.target import Target


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the Llama layout: x [heads, n, d], cos and sin [n, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, bias=bias)
        self.up_proj = Linear(hidden, intermediate, bias=bias)
        self.down_proj = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Projections(nn.Module):
    """The four matrices of attention; what attends to what is the caller's business."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, d = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * d, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * d, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * d, bias=config.attention_bias)
        self.o_proj = Linear(config.num_heads * d, config.hidden_size, bias=False)


class Rotary(LlamaRotaryEmbedding):
    """RoPE whose frequencies stay float32 whatever dtype the head is moved to: in bfloat16 the
    angles of late positions would be wrong by whole turns.
    """

    inv_freq: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        kept = {name: buffer for name, buffer in self.named_buffers()}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self


class Layer(nn.Module):
    """The head's decoder layer, in the parts that decoding and the training unroll put together
    differently.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        h, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(h, eps)
        self.hidden_norm = nn.RMSNorm(h, eps)
        self.self_attn = Projections(config)
        self.post_attention_layernorm = nn.RMSNorm(h, eps)
        self.mlp = Mlp(h, config.intermediate_size, config.mlp_bias)

    def inputs(self, embeds: Tensor, z: Tensor) -> Tensor:
        """The attention input [n, 2H]: normalised embedding first, normalised state second."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(z)], dim=-1)

    def query(self, u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """u [n, 2H] -> rotated queries [h, n, d]."""
        return rotate(self._heads(self.self_attn.q_proj(u)), cos, sin)

    def key_value(self, u: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """u [n, 2H] -> rotated keys and values, [g, n, d] each."""
        keys = rotate(self._heads(self.self_attn.k_proj(u)), cos, sin)
        return keys, self._heads(self.self_attn.v_proj(u))

    def output(self, z: Tensor, attended: Tensor) -> Tensor:
        """Residual state z [n, H] and attention output [h, n, d] -> g [n, H]."""
        residual = self.hidden_norm(z) if self.config.norm_before_residual else z
        merged = attended.transpose(0, 1).flatten(1)
        r = residual + self.self_attn.o_proj(merged)
        return r + self.mlp(self.post_attention_layernorm(r))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (x.shape[1] // self.config.head_dim, self.config.head_dim)).transpose(
            0, 1
        )


class Eagle3Head(nn.Module):
    """An EAGLE-3 or EAGLE-3.1 head. `draft_ids` int64 [V_d] are the target ids it can propose,
    ascending.
    """

    draft_ids: Tensor

    def __init__(self, config: Eagle3Config, draft_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        eps = config.rms_norm_eps
        self.fc = Linear(config.num_taps * config.target_width, config.hidden_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(config.target_width, eps) for _ in range(config.num_taps)
            )
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.num_taps * config.target_width, eps)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens: nn.Embedding | None = None
        self.register_buffer("draft_ids", draft_ids.long(), persistent=False)
        self.rotary = Rotary(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope),
            )
        )

    @property
    def kind(self) -> str:
        """`eagle3` or `eagle3.1`."""
        return self.config.kind

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def about(self) -> dict[str, Any]:
        """The `head` entry of headsmith.json."""
        return {
            "kind": self.kind,
            "taps": list(self.taps),
            **{flag: getattr(self.config, flag) for flag in FLAGS},
            "draft_vocab_size": self.config.draft_vocab_size,
        }

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_ids: Tensor,
        *,
        taps: tuple[int, ...] | None = None,
        fc_norm: bool = False,
        norm_output: bool = False,
        seed: int = 0,
        **sizes: int,
    ) -> "Eagle3Head":
        """A fresh float32 head of the target's widths and RoPE, but for `sizes`
        (models/eagle3_shape.py); its taps are still to be balanced (models/eagle3_init.py).
        """
        config = Eagle3Config.for_target(
            target, len(draft_ids), taps=taps, fc_norm=fc_norm, norm_output=norm_output, **sizes
        )
        head = cls(config, draft_ids.cpu())
        rows = target.head_weight[draft_ids.to(target.device)]
        if config.owns_embedding:
            table = target.embed(torch.arange(target.vocab_size, device=target.device))
            own = narrowed(table, config.hidden_size).cpu()
            head.embed_tokens = nn.Embedding.from_pretrained(own)
            rows = narrowed(rows, config.hidden_size)
        initialise(head, rows, seed)
        return head

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        taps: tuple[int, ...] | None = None,
        num_target_layers: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        config_json: dict[str, Any] | None = None,
    ) -> "Eagle3Head":
        """Load a native or speculators checkpoint; `taps` overrides what its config says, and
        `config_json` stands in for its whole config.json.

        A config that names no taps means the default ones, which need `num_target_layers`. Raises
        HeadsmithError when a tensor is missing, unknown or of another shape: engines stay silent
        about that (spec/engines.md 5).
        """
        config, tensors, draft_ids = read_checkpoint(
            Path(path), taps, num_target_layers, config_json
        )
        head = cls(config, draft_ids)
        embedding = tensors.pop("embed_tokens.weight", None)
        load_strictly(head, Path(path), tensors)
        if embedding is not None:
            name, shape = "embed_tokens.weight", (config.vocab_size, config.hidden_size)
            check_shape(Path(path), name, embedding, shape)
            check_finite(Path(path), name, embedding)
            head.embed_tokens = nn.Embedding.from_pretrained(embedding.clone())
        elif config.owns_embedding:
            raise HeadsmithError(
                f"head {path} is {config.hidden_size} wide and its target {config.target_width}, "
                "but it has no embed_tokens.weight; the target's embeddings do not fit it"
            )
        return head.to(device=device, dtype=dtype)

    def save(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors (native layout, spec/eagle.md 5) into the folder
        `path`.
        """
        write_checkpoint(
            Path(path), self.config, self.state_dict(), self.embed_tokens, self.draft_ids, dtype
        )

    def embed(self, target: Target, ids: Tensor) -> Tensor:
        """Embeddings of target ids [n] -> [n, H]: the head's own table if it has one, else the
        target's.
        """
        return target.embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)

    def read(self, taps: Tensor) -> Tensor:
        """Target taps [n, m, H_t] as `fc` reads them, same shape: normed if the flags say so."""
        if self.config.norm_before_fc:
            taps = self.input_norm(taps.flatten(1)).view_as(taps)
        if self.config.fc_norm:
            taps = torch.stack(
                [norm(tap) for norm, tap in zip(self.fc_norm, taps.unbind(1), strict=True)], 1
            )
        return taps

    def fuse(self, taps: Tensor) -> Tensor:
        """Target taps [n, m, H_t] -> z [n, H]. Only ever applied to the target's own states."""
        return self.fc(self.read(taps).flatten(1))

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary tables of positions [n] -> cos, sin [n, d] in the head's dtype."""
        cos, sin = self.rotary(self.norm.weight, positions[None])
        return cos[0], sin[0]

    def feedback(self, g: Tensor) -> Tensor:
        """The state that the next step reads: g, or its norm in EAGLE-3.1."""
        return self.norm(g) if self.config.norm_output else g

    def logits(self, g: Tensor) -> Tensor:
        """g [n, H] -> logits over the draft vocabulary [n, V_d]; exactly one final norm, whatever
        the flags.
        """
        return self.lm_head(self.norm(g))
