"""Read exported Medusa heads as their engine does, and compute what they draft.

The check on the writer: no code is shared with it. Rules from spec/medusa.md 1.3-1.5.

Shapes: n rows, H width, K heads, V_d ids that can be drafted.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from headsmith.models.formats.reader_tensors import Stored

# With one of these in it TGI finds no speculator, and vLLM takes the target's for the heads' own.
_FORBIDDEN = {
    "tgi": ("architectures", "model_type"),
    "trtllm": ("architectures", "model_type"),
    "vllm": ("num_attention_heads", "num_key_value_heads", "medusa_num_heads", "medusa_num_layers"),
}


class EngineMedusa(Stored):
    """Exported heads as the engine `name` would run them, in float32. `ids` int64 [V_d] are the
    target ids of the rows of their lm_heads.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for key in _FORBIDDEN[name]:
            if key in raw:
                self._fault(f"has {key} in its config.json, which {name} would misread")
        self._heads: list[Tensor | None] = []
        if name == "vllm":
            self._read_vllm(raw)
        else:
            self._read_original(raw, name)
        if self._tensors:
            self._fault(f"holds {min(self._tensors)}, which {name} does not read")

    def logits(self, last: Tensor, target_rows: Tensor) -> Tensor:
        """Logits of every head: post-norm last states [n, H] -> [K, n, V_d]. `target_rows` [V, H]
        is the target's lm_head, for an engine that borrows it.
        """
        found = []
        for block, rows in zip(self._blocks, self._heads, strict=True):
            x = last.float()
            for weight, bias in block:
                x = x + F.silu(x @ weight.T + bias)
            found.append(x @ (target_rows.float() if rows is None else rows).T)
        return torch.stack(found)

    def _read_vllm(self, raw: dict[str, Any]) -> None:
        self._tensors = load_file(self.folder / "model.safetensors")
        if raw.get("model_type") != "medusa" or raw.get("medusa_fc_bias") is not True:
            self._fault("does not say model_type medusa with medusa_fc_bias, so biases are dropped")
        width, vocab = raw["hidden_size"], raw["vocab_size"]
        heads = [key for key in raw if "num" in key and "heads" in key]
        layers = [key for key in raw if "num" in key and "layers" in key]
        if heads != ["num_heads"] or layers != ["num_hidden_layers"]:
            self._fault(f"has {heads + layers} in its config.json, and vLLM renames such keys")
        self._blocks = self._take_blocks(
            raw["num_heads"], raw["num_hidden_layers"], "blocks.{i}.layers.{j}.{part}", width
        )
        size = raw["truncated_vocab_size"]
        self.ids = torch.arange(vocab)
        if size < vocab:
            self.ids = self._take("token_map", [size]).long()
        if raw["original_lm_head"]:
            self._heads = [self._take("lm_head.weight", [size, width])] * raw["num_heads"]
        else:
            self._heads = [
                self._take(f"lm_heads.{i}.weight", [size, width]) for i in range(raw["num_heads"])
            ]

    def _read_original(self, raw: dict[str, Any], name: str) -> None:
        """Layout A, with a lm_head for every head, or B, without (spec/medusa.md 1.2)."""
        self._tensors = load_file(self.folder / "medusa_lm_head.safetensors")
        count, layers = raw["medusa_num_heads"], raw["medusa_num_layers"]
        if name == "trtllm" and raw["num_medusa_heads"] != count:
            self._fault("names two numbers of heads")
        if not raw["base_model_name_or_path"]:
            self._fault("does not name its target")
        width = self._tensors["0.0.linear.weight"].shape[0]
        self._blocks = self._take_blocks(count, layers, "{i}.{j}.linear.{part}", width)
        if name == "tgi" and f"0.{layers}.weight" not in self._tensors:
            if layers != 1:
                self._fault("has no lm_heads, which TGI accepts of heads of one layer only")
            self._heads = [None] * count
            self.ids = torch.empty(0, dtype=torch.int64)
            return
        rows = self._tensors[f"0.{layers}.weight"].shape[0]
        self._heads = [self._take(f"{i}.{layers}.weight", [rows, width]) for i in range(count)]
        self.ids = torch.arange(rows)

    def _take_blocks(
        self, heads: int, layers: int, name: str, width: int
    ) -> list[list[tuple[Tensor, Tensor]]]:
        return [
            [
                (
                    self._take(name.format(i=i, j=j, part="weight"), [width, width]),
                    self._take(name.format(i=i, j=j, part="bias"), [width]),
                )
                for j in range(layers)
            ]
            for i in range(heads)
        ]
