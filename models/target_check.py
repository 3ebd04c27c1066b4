"""Whether an architecture can be a target: it must agree with itself when it runs by spans.

What is wrong here would be wrong in every head that is trained on it, silently.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.models import attention
from headsmith.models.spans import Span

if TYPE_CHECKING:
    from headsmith.models.target import Target


@torch.inference_mode()
def check_target(target: "Target") -> None:
    """Head on last state = its logits, taps = its states, documents in one row stay apart.

    Raises HeadsmithError with what differs.
    """
    ids = torch.arange(12, device=target.device) % target.vocab_size
    cannot = f"this architecture ({target.config.model_type}) cannot be a target"
    try:
        packed = target.run(
            torch.cat([ids.flip(0), ids]), [Span(12), Span(12)], taps=range(target.num_layers)
        )
        target.model.set_attn_implementation("eager")
        own = target.model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        target.model.set_attn_implementation(attention.NAME)
        states = torch.stack([state[0] for state in own.hidden_states[:-1]], 1)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise HeadsmithError(f"{target.path}: a pass over it fails ({reason}); {cannot}") from error
    _compare(
        target,
        "the output head on the last state differs from the model's logits",
        target.logits(packed.last[12:]),
        own.logits[0],
        cannot,
    )
    _compare(
        target,
        "the tapped states differ from the model's hidden states",
        packed.taps[12:],
        states,
        cannot,
    )


def _compare(target: "Target", what: str, ours: Tensor, theirs: Tensor, cannot: str) -> None:
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        raise HeadsmithError(
            f"{target.path}: the target's states hold NaN or infinity; try float32, or get its "
            "weights again"
        )
    if ours.shape != theirs.shape:
        raise HeadsmithError(f"{target.path}: {what} (in shape); {cannot}")
    gap = (ours.float() - theirs.float()).abs().max() / theirs.abs().max().clamp_min(1e-6)
    tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.1
    if not gap <= tolerance:
        raise HeadsmithError(f"{target.path}: {what} (relative gap {gap:.1e}); {cannot}")
