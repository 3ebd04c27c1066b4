"""The engine as one that continues token ids, for on-policy data: any drafter, the same text.

Noise is keyed by seed, conversation, turn and position (headsmith.inference.noise), so a drawn
answer is the same in any batch and with any drafter that the rule couples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headsmith.inference.measure import Session
from headsmith.inference.prompts import RequestBuilder
from headsmith.inference.records import Request, Response
from headsmith.inference.settings import EvalSettings
from headsmith.models.target import Target


@dataclass(frozen=True, slots=True)
class Prompted:
    """Token ids to continue: the `turn`th answer of the conversation `key`."""

    key: str
    turn: int
    ids: list[int]


class EngineAnswers:
    """Continues token ids by `settings`, of which target, head, drafter, draft, rule, sampling,
    limit, batch, dtype, device and threads count. HeadsmithError when they cannot be loaded.
    """

    def __init__(self, settings: EvalSettings) -> None:
        from headsmith.inference.evaluate import load_pair

        target, head, self.warnings = load_pair(settings)
        self.target: Target = target
        builder = RequestBuilder(target.tokenizer, target.max_context)
        session = Session(settings, target, head, [], builder)
        self.decoder = session.decoder(settings.batch[0], plain=not session.drafts)
        self.committed = self.passes = 0

    def run(
        self, prompts: Sequence[Prompted], done: Callable[[int, list[int], bool], None]
    ) -> None:
        """Continue all prompts; `done` gets the number of one, its new ids, and whether a limit
        and not the target ended it.
        """
        numbers = {(one.key, one.turn): number for number, one in enumerate(prompts)}
        requests = [Request(one.key, "", one.ids, one.turn, one.key) for one in prompts]

        def finished(response: Response) -> None:
            request = response.request
            self.passes += len(response.passes)
            self.committed += sum(one.committed for one in response.passes)
            cut = response.finish_reason in ("length", "context")
            done(numbers[request.conversation, request.turn], response.output_ids, cut)

        self.decoder.generate(requests, finished)
