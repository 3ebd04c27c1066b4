"""Forced acceptance, for benchmarks/gpu_decode.py on random weights, which accept nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headsmith.inference.judging import Judge
from headsmith.inference.kernels.verify import Nodes


@dataclass(slots=True)
class Forced(Judge):
    """Keeps `tau` - 1 drafts of a deepest path on the average, whatever the target says; trees have
    one number of nodes. Nothing is asked of the host, so that rounds can be captured with it.
    """

    tau: float = 1.0
    due: dict[int, Tensor] = field(default_factory=dict)

    def chosen(self, choices: Tensor, nodes: Callable[[], Nodes]) -> Tensor:
        trees = nodes()
        batch = len(trees.offsets) - 1
        tokens, parents = (x.view(batch, -1).long() for x in (trees.tokens, trees.parents))
        if batch not in self.due:
            self.due[batch] = torch.zeros(batch, device=choices.device)
        owed = self.due[batch]
        owed += self.tau - 1
        path, depths = deepest(parents)
        kept = path & (depths <= owed[:, None])
        owed -= kept.sum(1) - 1
        # Each kept node says what its child on the path holds, and the last what no node holds.
        held = torch.arange(tokens.shape[1] + 1, device=tokens.device)
        free = (tokens[:, :, None] == held).any(1).int().argmin(1)
        last = (depths * kept).argmax(1)
        said = choices.view(batch, -1).scatter(1, last[:, None], free[:, None])
        child = kept & (parents >= 0)
        aside = torch.cat([said, said[:, :1]], 1)
        at = torch.where(child, parents, tokens.shape[1])
        return aside.scatter(1, at, tokens)[:, :-1].flatten()


def deepest(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Of trees int64 [B, N], the nodes from the root to the first of the deepest, bool [B, N], and
    the depths of all, int64 [B, N].
    """
    batch, nodes = parents.shape
    own = torch.eye(nodes, device=parents.device).expand(batch, -1, -1)
    above = own + (parents[:, :, None] == torch.arange(nodes, device=parents.device))
    reach = 1
    while reach < nodes:
        above, reach = ((above @ above) > 0).float(), 2 * reach
    depths = (above > 0).sum(2) - 1
    first = depths.argmax(1)
    path = above.gather(1, first[:, None, None].expand(-1, 1, nodes))[:, 0] > 0
    return path, depths
