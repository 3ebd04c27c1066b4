"""Read an exported EAGLE-3 head as its engine does, and compute what it drafts.

This file is the check on the writer, so it shares no code with it, nor with the head that was
exported: it knows what each engine looks for in config.json (`reader_rules`), takes the tensors by
name, and writes the head's forward pass out in plain operations. Unlike the engines it says so when
a tensor is missing, unknown or of another shape.

Shapes: n rows, m taps, H_t target width, H width, h heads, g key/value heads, d head size.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headsmith.models.formats.reader_rules import READERS
from headsmith.models.formats.reader_tensors import Stored

Embed = Callable[[Tensor], Tensor]


_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


class EngineHead(Stored):
    """An exported head as the engine `name` would run it, in float32."""

    def __init__(self, folder: Path, name: str, num_layers: int | None) -> None:
        self.folder = folder
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.reading = reading = READERS[name](raw, folder, num_layers)
        body = reading.body
        self.width: int = body["hidden_size"]
        self.heads: int = body["num_attention_heads"]
        self.groups: int = body["num_key_value_heads"]
        self.dim: int = body["head_dim"]
        self.eps: float = body["rms_norm_eps"]
        self.vocab: int = body["vocab_size"]
        self._tensors = load_file(folder / "model.safetensors")
        self._weights = self._take_all()
        self.ids = self._target_ids()
        left = sorted(self._tensors)
        if left:
            self._fault(f"holds {left[0]}, which {name} does not read")
        self._rotary = LlamaRotaryEmbedding(LlamaConfig(**body))

    @property
    def taps(self) -> tuple[int, ...]:
        return self.reading.taps

    @torch.no_grad()
    def logits(self, taps: Tensor, tokens: Tensor, forced: Sequence[int], embed: Embed) -> Tensor:
        """Logits of a chain of 1 + len(forced) drafts behind n committed rows: float32
        [1 + len(forced), V_d].

        taps [n, m, H_t] and tokens int64 [n] are those rows (x[i+1] with the taps of x[i]);
        `forced` are the target ids that are taken for the drafts. embed(ids) are the target's
        embeddings [., H].
        """
        table = self._weights.get("embed_tokens.weight")
        if table is not None:
            own = table
            embed = lambda ids: own[ids]  # noqa: E731
        keys: list[Tensor] = []
        values: list[Tensor] = []
        first = self._fused(taps.float())
        states = self._layer(embed(tokens), first, 0, keys, values)
        found = [self._head(states[-1:])]
        state = states[-1:]
        for step, token in enumerate(forced):
            fed = self._norm(state, "norm.weight") if "norm_output" in self.reading.flags else state
            state = self._layer(embed(torch.tensor([token])), fed, len(tokens) + step, keys, values)
            found.append(self._head(state))
        return torch.cat(found)

    def _fused(self, taps: Tensor) -> Tensor:
        if "norm_before_fc" in self.reading.flags:
            taps = self._norm(taps.flatten(1), "input_norm.weight").view_as(taps)
        parts = list(taps.unbind(1))
        if "fc_norm" in self.reading.flags:
            parts = [self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
        return torch.cat(parts, -1) @ self._weights["fc.weight"].T

    def _layer(
        self, embeds: Tensor, z: Tensor, start: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """The layer over rows at positions start, start + 1, ..; their keys and values are added
        to those of the rows before. [n, H] each -> [n, H].
        """
        positions = torch.arange(start, start + len(z))
        normed = self._norm(z, "hidden_norm.weight")
        both = torch.cat([self._norm(embeds, "input_layernorm.weight"), normed], -1)
        cos, sin = self._rotary(z, positions[None])
        q = self._turned(self._linear(both, "self_attn.q_proj"), self.heads, cos[0], sin[0])
        keys.append(
            self._turned(self._linear(both, "self_attn.k_proj"), self.groups, cos[0], sin[0])
        )
        values.append(self._linear(both, "self_attn.v_proj").view(len(z), self.groups, self.dim))
        all_keys, all_values = torch.cat(keys), torch.cat(values)
        mixed = torch.empty(len(z), self.heads, self.dim)
        for row, position in enumerate(positions.tolist()):
            window = self.reading.window
            begin = 0 if window is None else max(0, position + 1 - window)
            for head in range(self.heads):
                group = head // (self.heads // self.groups)
                seen = all_keys[begin : position + 1, group]
                scores = seen @ q[row, head] / self.dim**0.5
                mixed[row, head] = scores.softmax(0) @ all_values[begin : position + 1, group]
        residual = normed if "norm_before_residual" in self.reading.flags else z
        r = residual + self._linear(mixed.flatten(1), "self_attn.o_proj")
        inner = self._norm(r, "post_attention_layernorm.weight")
        gate = F.silu(self._linear(inner, "mlp.gate_proj"))
        return r + self._linear(gate * self._linear(inner, "mlp.up_proj"), "mlp.down_proj")

    def _turned(self, x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding: [n, heads * d] -> [n, heads, d]."""
        x = x.view(len(x), heads, self.dim)
        low, high = x[..., : self.dim // 2], x[..., self.dim // 2 :]
        return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]

    def _head(self, g: Tensor) -> Tensor:
        return self._norm(g, "norm.weight") @ self._weights["lm_head.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self._weights[name]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _take_all(self) -> dict[str, Tensor]:
        """The tensors that the config announces, under the layer's own names, as float32."""
        r, body, h = self.reading, self.reading.body, self.width
        inner, count = body["intermediate_size"], len(r.taps)
        shapes: dict[str, list[int]] = {
            "fc.weight": [h, count * r.target_width],
            "norm.weight": [h],
            "lm_head.weight": [r.draft_vocab, h],
        }
        rows = {
            "q": self.heads * self.dim,
            "k": self.groups * self.dim,
            "v": self.groups * self.dim,
        }
        layer = {
            **{f"self_attn.{part}_proj.weight": [size, 2 * h] for part, size in rows.items()},
            "self_attn.o_proj.weight": [h, self.heads * self.dim],
            "mlp.gate_proj.weight": [inner, h],
            "mlp.up_proj.weight": [inner, h],
            "mlp.down_proj.weight": [h, inner],
            **{f"{norm}.weight": [h] for norm in _NORMS},
        }
        if body.get("attention_bias"):
            layer |= {f"self_attn.{part}_proj.bias": [size] for part, size in rows.items()}
        if body.get("mlp_bias"):
            layer |= {"mlp.gate_proj.bias": [inner], "mlp.up_proj.bias": [inner]}
            layer["mlp.down_proj.bias"] = [h]
        if "fc_norm" in r.flags:
            shapes |= {f"fc_norm.{i}.weight": [r.target_width] for i in range(count)}
        if "norm_before_fc" in r.flags:
            shapes["input_norm.weight"] = [count * r.target_width]
        taken = {name: self._take(name, shape) for name, shape in shapes.items()}
        taken |= {name: self._take(r.layer + name, shape) for name, shape in layer.items()}
        table = self._tensors.pop("embed_tokens.weight", None)
        if r.own_table:
            if table is None and r.target_width != h:
                self._fault("has no embed_tokens.weight, and the target's embeddings do not fit")
            if table is not None:
                taken["embed_tokens.weight"] = table.float()
        return taken

    def _target_ids(self) -> Tensor:
        """The target id of each row of lm_head: its number plus d2t."""
        rows = torch.arange(self.reading.draft_vocab)
        offset, mask = self._tensors.pop("d2t", None), self._tensors.pop("t2d", None)
        if self.reading.draft_vocab == self.vocab:
            if offset is not None or mask is not None:
                self._fault("has d2t or t2d beside the whole vocabulary, which vLLM refuses")
            return rows
        if offset is None or mask is None:
            self._fault("drafts a part of the vocabulary and lacks d2t or t2d")
        ids = rows + offset
        if mask.nonzero().flatten().tolist() != ids.tolist():
            self._fault("has a d2t and a t2d of different ids")
        return ids
