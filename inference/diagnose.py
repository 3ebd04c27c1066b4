"""`headsmith eval --diagnose drift`: what a head reads at each depth of its own drafts.

A head that drafts from its own states can drift (spec/eagle.md 2.2): what it feeds back grows, and
its attention leaves the prompt for its own drafts. For depths 1..D of a chain, at every pass of
greedy decoding, this measures

    state_rms        RMS of the state that the drafting row reads: fc of the target's taps at
                     depth 1, what the row before fed back from then on
    output_rms       RMS of the row's output g, before any norm
    attention_sink   share of the row's attention, mean over heads, on the first four tokens
    attention_text   on the rest of the prompt and on the committed text
    attention_own    on the head's own drafts, the row itself included; none at depth 1, whose row
                     has the target's taps
    conditional      c_i: of the passes that accepted i - 1 drafts, those that accepted the next

The states and weights are means over all passes of a context, whatever was accepted. Decoding by
`EagleDrafter` knows nothing of this: the recorder is a subclass that computes the attention of the
drafting rows once more, with the weights written out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.context import context_of
from headsmith.inference.drafters import EagleDrafter, Update
from headsmith.inference.engine import Decoder
from headsmith.inference.measure import Session
from headsmith.inference.metrics import conditional, unconditional
from headsmith.inference.records import Request, Response
from headsmith.inference.tree import Chain, Tree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.linear import at_least_float32
from headsmith.models.spans import Span, positions_of, visible
from headsmith.models.target import Target

SINK_TOKENS = 4
FIGURES = ("state_rms", "output_rms", "attention_sink", "attention_text", "attention_own")
# Without --context, passes are grouped by how much was committed, in steps of two.
SMALLEST_BUCKET = 128


@dataclass(slots=True)
class DraftedPass:
    """What the drafting rows of one pass read: `committed` tokens were known, the root included;
    figures float32 [D, len(FIGURES)].
    """

    committed: int
    figures: Tensor


class DriftRecorder(EagleDrafter):
    """Drafts chains exactly as `EagleDrafter` does, for one request at a time, and looks at every
    drafting row. `passes` are in the order of the decoder's.
    """

    def __init__(self, head: Eagle3Head, target: Target, depth: int) -> None:
        super().__init__(head, target, Chain(depth))
        self.passes: list[DraftedPass] = []
        self._figures: list[Tensor] = []

    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        (update,) = updates
        self._figures = []
        trees = super().propose(updates)
        committed = self._lengths[update.slot] + 1
        self.passes.append(DraftedPass(committed, torch.stack(self._figures)))
        return trees

    def _layer(
        self, tokens: Tensor, z: Tensor, spans: Sequence[Span], last: Tensor | None = None
    ) -> Tensor:
        g = super()._layer(tokens, z, spans, last)
        (span,) = spans
        weights, _ = self.look(tokens, z, span)
        shares = weights[:, 0].mean(0)
        committed = self._lengths[span.slot]
        sink = min(SINK_TOKENS, committed)
        sums = [part.sum() for part in shares.tensor_split((sink, committed))]
        self._figures.append(torch.stack([_rms(z[-1]), _rms(g[-1]), *sums]).float())
        return g

    def look(self, tokens: Tensor, z: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Attention of the last of the rows that were just run: weights [h, 1, P], at least
        float32, over all cached rows, and its output [h, 1, d].
        """
        layer = self.head.midlayer
        u = layer.inputs(self.head.embed(self.target, tokens), z)
        cos, sin = self.head.cos_sin(positions_of([span], tokens.device))
        # The same keys and values once more, to the same place.
        keys, values = self.cache.extend(0, span, *layer.key_value(u, cos, sin))
        query = layer.query(u[-1:], cos[-1:], sin[-1:])
        mask = visible(span, keys.shape[1], self.head.config.sliding_window, tokens.device)
        groups = query.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
        scores = at_least_float32(query @ keys.transpose(1, 2)) * query.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[-1:], float("-inf"))
        weights = scores.softmax(-1)
        return weights, weights.to(values.dtype) @ values


def check_diagnosis(head: object) -> None:
    """HeadsmithError for a head that feeds no state back and so cannot drift."""
    if not isinstance(head, Eagle3Head):
        kind = getattr(head, "kind", type(head).__name__)
        raise HeadsmithError(
            "drift is a matter of heads that read their own states, eagle3 and eagle3.1; this "
            f"head, of kind {kind}, has none to follow"
        )


def diagnose(session: Session) -> dict[str, Any]:
    """The `diagnosis` of result.json, over the requests that the session has measured."""
    settings, head = session.settings, session.head
    assert isinstance(head, Eagle3Head)
    requests = [request for wave in session.waves for request in wave]
    done = 0

    def report(response: Response) -> None:
        nonlocal done
        done += 1
        if session.on_progress is not None:
            session.on_progress(done, len(requests), "drift")

    drift = measure_drift(
        session.target,
        head,
        requests,
        depth=settings.diagnose_depth,
        max_new_tokens=settings.max_new_tokens,
        stop=settings.stop,
        brought=bool(settings.context),
        on_response=report,
    )
    return {"drift": drift}


def measure_drift(
    target: Target,
    head: Eagle3Head,
    requests: Sequence[Request],
    *,
    depth: int,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    brought: bool = False,
    on_response: Callable[[Response], None] | None = None,
) -> dict[str, Any]:
    """Decode greedily with chains of `depth` and measure what this module says.

    Rows are grouped by the length that the prompts were brought to (`brought`, see
    `headsmith.inference.context`), else by the tokens committed before the pass.
    """
    recorder = DriftRecorder(head, target, depth)
    decoder = Decoder(target, recorder, max_new_tokens=max_new_tokens, stop_strings=stop)
    responses, _ = decoder.generate(requests, on_response)
    # One request at a time, so the recorder's passes follow the responses' own.
    passes = [(response.request, one) for response in responses for one in response.passes]
    groups: dict[int, list[tuple[DraftedPass, int]]] = defaultdict(list)
    for (request, one), seen in zip(passes, recorder.passes, strict=True):
        # At the context's end chains are cut short, which is no fault of the head.
        if one.proposed == depth:
            group = context_of(request.task) if brought else _bucket(seen.committed)
            groups[group].append((seen, one.accepted))
    return {
        "draft": str(recorder.shape),
        "sink_tokens": SINK_TOKENS,
        "grouped_by": "prompt length" if brought else "committed tokens",
        "rows": [
            row
            for start in sorted(groups)
            for row in _rows(_label(start, brought), groups[start], depth)
        ],
    }


def _rows(label: str, seen: Sequence[tuple[DraftedPass, int]], depth: int) -> list[dict[str, Any]]:
    """A row for each depth: means over the passes of a group, and its c_i."""
    figures = torch.stack([one.figures for one, _ in seen]).double().mean(0).tolist()
    histogram = np.bincount([accepted for _, accepted in seen], minlength=depth + 1)
    given = conditional(unconditional(histogram))
    return [
        {
            "context": label,
            "depth": at + 1,
            "mean_context": float(np.mean([one.committed for one, _ in seen])),
            **dict(zip(FIGURES, figures[at], strict=True)),
            "conditional": given[at],
            "reached": int(histogram[at:].sum()),
            "passes": len(seen),
        }
        for at in range(depth)
    ]


def _bucket(committed: int) -> int:
    """0 or the largest of 128, 256, 512, ... that is no larger."""
    return 0 if committed < SMALLEST_BUCKET else 1 << (committed.bit_length() - 1)


def _label(start: int, brought: bool) -> str:
    if brought:
        return str(start)
    end = 2 * start if start else SMALLEST_BUCKET
    return f"{start}-{end - 1}"


def _rms(x: Tensor) -> Tensor:
    return at_least_float32(x).square().mean().sqrt()
