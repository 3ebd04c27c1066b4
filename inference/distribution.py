"""Was the output drawn from the target's distribution? For rules whose text is not that of plain
sampling, though its distribution is.

Behind each output token's text, log p of that token is compared with its mean over p. The sum of
the differences over its standard deviation, both from the target alone, is a standard normal
number z for any text that was drawn from p, whenever it ended: differences have mean 0 whatever
came before. Text that leans to what the drafter likes, or to likelier tokens, moves it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headsmith.inference.equality import places_of, teacher_forced
from headsmith.inference.ratio import Ratio
from headsmith.inference.records import Response
from headsmith.models.target import Target


@dataclass(slots=True)
class Drawn:
    """Counts over output tokens. `impossible`: those that the settings leave out for sure.
    `log_likelihood` in nats a token, `expected` that of the target's own draws behind the same
    texts, `z` their difference in standard deviations, None if there is no chance in it.
    """

    tokens: int = 0
    impossible: int = 0
    log_likelihood: float | None = None
    expected: float | None = None
    z: float | None = None


@torch.inference_mode()
def check_distribution(
    target: Target, responses: Sequence[Response], rule: Ratio, margin: float = 0.25
) -> Drawn:
    """Judge every output token behind prompt + output so far. A token that a setting cuts off by
    more than `margin` could not be drawn: one of them means a bug of the decoder.
    """
    total, counted = Drawn(), 0
    own_sum = mean_sum = variance_sum = 0.0
    for response in responses:
        places, logits = places_of(response), teacher_forced(target, response)
        tokens = torch.tensor(response.output_ids, device=target.device)[:, None]
        log_p = rule.plain.log_weights(logits, places).double().log_softmax(-1)
        loose = rule.plain.log_weights(logits, places, slack=margin).gather(1, tokens)[:, 0]
        own, p = log_p.gather(1, tokens)[:, 0], log_p.exp()
        finite = log_p.masked_fill(p == 0, 0.0)
        mean = (p * finite).sum(-1)
        variance = (p * (finite - mean[:, None]).square()).sum(-1)
        # What only rounding may have let in has no log p; it is few, and left out.
        known = own.isfinite()
        total.tokens += len(own)
        total.impossible += int((~loose.isfinite()).sum())
        counted += int(known.sum())
        own_sum += float(own[known].sum())
        mean_sum += float(mean[known].sum())
        variance_sum += float(variance[known].sum())
    if counted:
        total.log_likelihood, total.expected = own_sum / counted, mean_sum / counted
    if variance_sum > 0:
        total.z = (own_sum - mean_sum) / math.sqrt(variance_sum)
    return total
