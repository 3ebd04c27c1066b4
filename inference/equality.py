"""Is the output the target's own? Each token is judged under one teacher-forced pass
(spec/verifier.md 3.6).

Unlike comparing strings, this does not cascade after the first difference, and it tells a numerical
tie from a bug.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.accept import GREEDY, Rule
from headsmith.inference.noise import Place
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
    target: Target,
    responses: Sequence[Response],
    tie_margin: float = 0.25,
    rule: Rule = GREEDY,
) -> Equality:
    """Classify every output token against plain causal attention over prompt + output, logits in
    float32. `rule` is the one the tokens were chosen by.

    exact: it is the rule's choice (or has the same score). tie: second, and at most `tie_margin`
    below, where a token that top-k, top-p or min-p cuts off by no more than that counts as either
    in or out. Else fail, which means a bug of the decoder, not of the head.
    """
    assert rule.coupled, "this rule's text is not the target's own, lossy or not; see likelihood"
    total = Equality()
    for response in responses:
        _check_one(target, response, tie_margin, total, rule)
    return total


@dataclass(slots=True)
class Likelihood:
    """What the target thinks of texts, token by token, given what stands before each: how many
    there are, how many are its first choice, and the sum of their log-probabilities in nats.
    """

    tokens: int = 0
    first_choices: int = 0
    log_likelihood: float = 0.0


@torch.inference_mode()
def likelihood(target: Target, responses: Sequence[Response]) -> Likelihood:
    """How likely the target finds the outputs, at temperature 1 whatever they were made with."""
    total = Likelihood()
    for response in responses:
        logits = teacher_forced(target, response).float()
        emitted = torch.tensor(response.output_ids, device=target.device)
        own = logits.log_softmax(-1).gather(1, emitted[:, None])
        total.tokens += len(emitted)
        total.first_choices += int((logits.argmax(-1) == emitted).sum())
        total.log_likelihood += float(own.double().sum())
    return total


def teacher_forced(target: Target, response: Response) -> Tensor:
    """The target's logits behind prompt and output so far, for each output token [n, V]."""
    prompt, output = response.request.prompt_ids, response.output_ids
    ids = torch.tensor([*prompt, *output], device=target.device)[:-1]
    logits = target.logits(target.run(ids, [Span(len(ids))]).last[len(prompt) - 1 :])
    if not logits.isfinite().all():
        raise HeadsmithError(
            f"the logits of the target {target.path} for the answer to prompt "
            f"{response.request.id} hold NaN or infinity; try float32, or get its weights again"
        )
    return logits


def places_of(response: Response) -> list[Place]:
    """Where each output token stands, with the text before it."""
    request, output = response.request, response.output_ids
    prompt = request.prompt_ids
    return [Place(request.name, len(prompt) + i, prompt, output[:i]) for i in range(len(output))]


def _check_one(
    target: Target, response: Response, tie_margin: float, total: Equality, rule: Rule
) -> None:
    places = places_of(response)
    logits = teacher_forced(target, response)
    scores = rule.scores(logits, places)
    own = scores.gather(1, torch.tensor(response.output_ids, device=target.device)[:, None])
    margins = (scores.max(-1).values - own[:, 0]).tolist()
    for index, margin in enumerate(margins):
        total.checked += 1
        if margin == 0:
            total.exact += 1
            continue
        row, token = logits[index : index + 1], response.output_ids[index]
        if _is_tie(rule, row, places[index], token, tie_margin):
            total.ties += 1
        else:
            total.fails += 1
        if total.first_divergence is None:
            # A token that was cut off has no score, and JSON no infinity.
            shown = margin if math.isfinite(margin) else "cut off"
            total.first_divergence = {"id": response.request.id, "index": index, "margin": shown}


def _is_tie(rule: Rule, logits: Tensor, place: Place, token: int, margin: float) -> bool:
    """Whether rounding alone may have made `token` the choice behind logits [1, V]: no more than
    one token that cannot have been cut off is likelier, and by no more than `margin`.
    """
    own = rule.scores(logits, [place], slack=margin)[0, token]
    rivals = rule.scores(logits, [place], slack=-margin)[0]
    above = int((rivals > own).sum())
    return bool(own.isfinite()) and above <= 1 and bool(rivals.max() - own <= margin)
