"""All kinds of heads behind one loader. What every head has: `kind`, `taps`, `draft_ids`, `config`,
`about()`, `save(folder)`.
"""

from pathlib import Path

import torch

from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import MODEL_TYPE
from headsmith.models.strict import read_json
from headsmith.models.target import Target

Head = Eagle3Head | MedusaHead


def read_head(
    path: str | Path,
    num_target_layers: int | None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Head:
    """The head of a checkpoint, of the kind that its config.json names."""
    if read_json(Path(path) / "config.json").get("model_type") == MODEL_TYPE:
        return MedusaHead.load(path, dtype=dtype, device=device)
    return Eagle3Head.load(path, num_target_layers=num_target_layers, dtype=dtype, device=device)


def load_head(
    path: str | Path,
    target: Target,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Head:
    """The head of a checkpoint, ready for its target.

    Raises HeadsmithError for a checkpoint that cannot be read or shares the lm_head of another
    target; `headsmith.models.provenance.check_pair` compares the rest.
    """
    head = read_head(path, target.num_layers, dtype=dtype, device=device)
    if isinstance(head, MedusaHead):
        head.pair(target, path)
    return head
