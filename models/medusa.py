"""Medusa heads (spec/medusa.md 1.1): K blocks that all read the target's post-norm last state.

Head k (from 0) at the state of x[t] predicts x[t+2+k]; the target's own lm_head there gives
x[t+1]. A head sees neither the tokens between nor the heads before it. Tensor names are those of
the layout that vLLM loads.

Shapes: n rows, H width, K heads, V_d ids that can be drafted.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headsmith.errors import HeadsmithError
from headsmith.models.linear import at_least_float32
from headsmith.models.medusa_files import (
    Calibration,
    LmHead,
    MedusaConfig,
    read_calibration,
    read_checkpoint,
    write_checkpoint,
)
from headsmith.models.strict import load_strictly

if TYPE_CHECKING:
    from headsmith.models.target import Target


class Block(nn.Module):
    """The residual layers of one head: x + SiLU(W x + b), each with weights of its own."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(nn.Module):
    """K Medusa heads. `draft_ids` int64 [V_d] are the target ids that they can propose.

    `shared` [V, H] is the target's lm_head where it is theirs too: no parameter, kept for saving.
    `calibration` is the draft tree stored beside the checkpoint; it belongs to those weights, and
    `save` does not write it.
    """

    draft_ids: Tensor
    kind = "medusa"
    taps: tuple[int, ...] = ()

    def __init__(self, config: MedusaConfig, draft_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        width, size = config.hidden_size, config.draft_vocab_size
        self.blocks = nn.ModuleList(
            Block(width, config.num_layers) for _ in range(config.num_heads)
        )
        if config.lm_head == "private":
            self.lm_heads = nn.ModuleList(
                nn.Linear(width, size, bias=False) for _ in range(config.num_heads)
            )
        elif config.lm_head == "truncated":
            self.lm_head = nn.Linear(width, size, bias=False)
        self.register_buffer("draft_ids", draft_ids.long(), persistent=False)
        self.shared: Tensor | None = None
        self.calibration: Calibration | None = None

    @classmethod
    def for_target(
        cls,
        target: "Target",
        draft_ids: Tensor | None = None,
        *,
        num_heads: int = 5,
        num_layers: int = 1,
        lm_head: LmHead = "shared",
    ) -> "MedusaHead":
        """Fresh float32 heads: each one's distribution is the target's next-token distribution.

        `draft_ids` [V_d] ascending is for a truncated lm_head and only for that.
        """
        vocab = target.vocab_size
        ids = torch.arange(vocab) if draft_ids is None else draft_ids.cpu()
        config = MedusaConfig(target.hidden_size, vocab, len(ids), num_heads, num_layers, lm_head)
        head = cls(config, ids)
        with torch.no_grad():
            # Zero biases too: with any other a block would not begin as the identity.
            for parameter in head.blocks.parameters():
                parameter.zero_()
            for module in head.own_lm_heads():
                module.weight.copy_(target.head_weight[ids.to(target.device)])
        head.pair(target)
        return head

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> "MedusaHead":
        """Load a checkpoint of vLLM's layout, and the tree that was calibrated for it.

        Raises HeadsmithError when a tensor is missing, unknown, misshaped or not finite: vLLM stays
        silent about unknown names and accepts nothing (spec/medusa.md 7.1).
        """
        config, tensors, draft_ids, shared = read_checkpoint(Path(path))
        head = cls(config, draft_ids)
        load_strictly(head, Path(path), tensors)
        head.shared = shared
        head.calibration = read_calibration(Path(path))
        return head.to(device=device, dtype=dtype)

    def save(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors (spec/medusa.md 1.5) into the folder `path`."""
        tensors = self.state_dict()
        write_checkpoint(Path(path), self.config, tensors, self.draft_ids, self.shared, dtype)

    def pair(self, target: "Target", path: str | Path = "") -> None:
        """Take the target's lm_head for a shared one, without a copy.

        Raises HeadsmithError if the checkpoint `path` stored another one.
        """
        if self.config.lm_head != "shared":
            return
        weight = target.head_weight
        if self.shared is not None and not _same(self.shared, weight):
            raise HeadsmithError(
                f"head {path}: its lm_head.weight is not that of the target {target.path}; it was "
                "trained for another target, or has an lm_head of its own for all heads, which is "
                "not supported"
            )
        self.shared = weight

    def own_lm_heads(self) -> list[nn.Linear]:
        """The lm_heads that are trained: K private ones, a truncated one, or none."""
        if self.config.lm_head == "private":
            return [module for module in self.lm_heads if isinstance(module, nn.Linear)]
        return [self.lm_head] if self.config.lm_head == "truncated" else []

    def about(self) -> dict[str, Any]:
        """The `head` entry of headsmith.json."""
        return {
            "kind": self.kind,
            "taps": [],
            "num_heads": self.config.num_heads,
            "num_layers": self.config.num_layers,
            "lm_head": self.config.lm_head,
            "draft_vocab_size": self.config.draft_vocab_size,
        }

    def state(self, k: int, last: Tensor) -> Tensor:
        """What the lm_head of head k reads: the target's last states [n, H] -> [n, H]."""
        return self.blocks[k](last)

    def logits(self, k: int, state: Tensor, target: "Target") -> Tensor:
        """Logits of head k over the draft vocabulary, with gradient: state [n, H] -> [n, V_d].

        Bias, scale and soft cap of the target's output apply to every kind of lm_head.
        """
        if self.config.lm_head == "shared":
            return target.logits_of(state.to(target.dtype), slice(None))
        module = self.lm_head if self.config.lm_head == "truncated" else self.lm_heads[k]
        return target.after_head(at_least_float32(module(state)), self.draft_ids)


def _same(stored: Tensor, own: Tensor) -> bool:
    """Equal but for the dtype that either is kept in."""
    if stored.shape != own.shape:
        return False
    least = min(stored.dtype, own.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(stored.to(own.device, least), own.to(least))
