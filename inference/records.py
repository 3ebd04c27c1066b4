"""What the decoder hands back: requests, responses, the integers of every verification pass.

Only raw integers are stored (spec/verifier.md D2); every rate and mean is derived from them in
`headsmith.inference.metrics`. `Steps` is one line of `steps.jsonl`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from headsmith.errors import HeadsmithError

RESULT_SCHEMA = "headsmith.result/1"
FinishReason = Literal["eos", "stop", "length", "context"]
_TURN = re.compile(r"#\d+$")


@dataclass(slots=True)
class Pass:
    """One verification pass: a target forward over the drafted tree.

    proposed: drafts on the scored path budget (chain: its depth; tree: its depth).
    accepted: longest verified prefix, 0..proposed, whatever was cut afterwards.
    committed: tokens added to the output, bonus included, after EOS/stop/limits cut it.
    nodes: draft nodes verified, the root excluded.
    """

    proposed: int
    accepted: int
    committed: int
    nodes: int


@dataclass(slots=True)
class Request:
    """One prompt to decode. `conversation` groups the turns of one conversation. `given_ids` are
    the tokens of a text that the answer is expected to follow, for the drafter of given text.
    """

    id: str
    task: str
    prompt_ids: list[int]
    turn: int = 0
    conversation: str = ""
    given_ids: list[int] | None = None

    @property
    def name(self) -> str:
        """What tells it from all others of an evaluation."""
        return f"{self.task}:{self.id}#{self.turn}"


@dataclass(slots=True)
class Response:
    """What a request gave. The first output token comes from the prefill and is in no pass.

    Times are wall seconds. token_times[i] is when output_ids[i] was committed, counted from when
    the request was taken up, queue_s after it arrived; so queue_s + token_times[0] is the time to
    the first token, of which prefill_s = token_times[0] was its prompt's.
    """

    request: Request
    output_ids: list[int]
    finish_reason: FinishReason
    passes: list[Pass]
    prefill_s: float
    decode_s: float
    token_times: list[float]
    queue_s: float = 0.0


@dataclass(slots=True)
class Phases:
    """Wall seconds of one generate() call, by what they were spent on."""

    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    @property
    def decode_s(self) -> float:
        """Everything after the prefill: drafting, verification, coordination."""
        return self.draft_s + self.verify_s + self.other_s

    def __add__(self, more: Phases) -> Phases:
        return Phases(
            self.prefill_s + more.prefill_s,
            self.draft_s + more.draft_s,
            self.verify_s + more.verify_s,
            self.other_s + more.other_s,
        )

    def __sub__(self, less: Phases) -> Phases:
        return Phases(
            self.prefill_s - less.prefill_s,
            self.draft_s - less.draft_s,
            self.verify_s - less.verify_s,
            self.other_s - less.other_s,
        )


@dataclass(slots=True)
class Round:
    """One round of the decoder: how many requests shared it, and what it took (no prefill)."""

    running: int
    phases: Phases


@dataclass(slots=True)
class Steps:
    """One line of `steps.jsonl`: a request's counts, without its text."""

    id: str
    task: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: FinishReason
    passes: list[Pass] = field(default_factory=list)

    @property
    def conversation(self) -> str:
        """What the request is clustered by: its task and its id without the turn's `#N`."""
        return f"{self.task}:{_TURN.sub('', self.id)}"

    @classmethod
    def of(cls, response: Response) -> Steps:
        """The counts of a response."""
        request = response.request
        return cls(
            id=request.id,
            task=request.task,
            prompt_tokens=len(request.prompt_ids),
            output_tokens=len(response.output_ids),
            finish_reason=response.finish_reason,
            passes=response.passes,
        )

    def to_json(self) -> dict[str, Any]:
        """The line as an object; `from_json` reads it back."""
        return {
            "id": self.id,
            "task": self.task,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "finish_reason": self.finish_reason,
            "passes": [[p.proposed, p.accepted, p.committed, p.nodes] for p in self.passes],
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Steps:
        """Reads a line of `steps.jsonl`; HeadsmithError when a key or a value does not fit."""
        try:
            steps = cls(
                id=str(line["id"]),
                task=str(line["task"]),
                prompt_tokens=int(line["prompt_tokens"]),
                output_tokens=int(line["output_tokens"]),
                finish_reason=line["finish_reason"],
                passes=[Pass(*_four_counts(counts)) for counts in line["passes"]],
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise HeadsmithError(
                f"a line of steps.jsonl is not one that headsmith wrote ({fault!r}); "
                "write the file again with `headsmith eval --out`"
            ) from fault
        if steps.finish_reason not in get_args(FinishReason):
            raise HeadsmithError(
                f"steps.jsonl: request {steps.id} ends with finish_reason "
                f"{steps.finish_reason!r}; known are {', '.join(get_args(FinishReason))}"
            )
        return steps


def _four_counts(counts: Iterable[Any]) -> tuple[int, int, int, int]:
    proposed, accepted, committed, nodes = (int(count) for count in counts)
    return proposed, accepted, committed, nodes
