"""Is the output the target's own? Each token is judged under one teacher-forced pass
(spec/verifier.md 3.6).

Unlike comparing strings, this does not cascade after the first difference, and it tells a numerical
tie from a bug.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headsmith.errors import HeadsmithError
from headsmith.inference.records import Response
from headsmith.models.spans import Span
from headsmith.models.target import Target


@dataclass(slots=True)
class Equality:
    """Counts over output tokens. `first_divergence` names the first request and output index that
    is not exact.
    """

    checked: int = 0
    exact: int = 0
    ties: int = 0
    fails: int = 0
    first_divergence: dict[str, int | str | float] | None = None


@torch.inference_mode()
def check_equality(
    target: Target, responses: Sequence[Response], tie_margin: float = 0.25
) -> Equality:
    """Classify every output token against plain causal attention over prompt + output, logits in
    float32.

    exact: it is the target's argmax (or equals its logit). tie: second, and at most `tie_margin`
    below. Else fail, which means a bug of the decoder, not of the head.
    """
    total = Equality()
    for response in responses:
        _check_one(target, response, tie_margin, total)
    return total


def _check_one(target: Target, response: Response, tie_margin: float, total: Equality) -> None:
    prompt, output = response.request.prompt_ids, response.output_ids
    ids = torch.tensor([*prompt, *output], device=target.device)[:-1]
    features = target.run(ids, [Span(len(ids))])
    emitted = torch.tensor(output, device=target.device)
    logits = target.logits(features.last[len(prompt) - 1 :])
    own = logits.gather(1, emitted[:, None])
    if not logits.isfinite().all():
        raise HeadsmithError(
            f"the logits of the target {target.path} for the answer to prompt "
            f"{response.request.id} hold NaN or infinity; try float32, or get its weights again"
        )
    margins = (logits.max(-1).values - own[:, 0]).tolist()
    ranks = (logits > own).sum(-1).tolist()
    for index, (margin, rank) in enumerate(zip(margins, ranks, strict=True)):
        total.checked += 1
        if margin == 0:
            total.exact += 1
            continue
        if rank == 1 and margin <= tie_margin:
            total.ties += 1
        else:
            total.fails += 1
        if total.first_divergence is None:
            total.first_divergence = {"id": response.request.id, "index": index, "margin": margin}
