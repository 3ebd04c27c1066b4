"""An evaluation as it runs: batch sizes, turns, the drafted decoder beside the plain one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headsmith.errors import HeadsmithError
from headsmith.inference import environment
from headsmith.inference.prompts import Conversation, RequestBuilder
from headsmith.inference.records import Request, Response
from headsmith.inference.settings import EvalSettings
from headsmith.inference.speed import Arm, Generates, alternate

if TYPE_CHECKING:
    from headsmith.inference.drafters import Drafter
    from headsmith.models.heads import Head
    from headsmith.models.target import Target

# Called with requests done, requests in all, and what is being run.
Progress = Callable[[int, int, str], None]
# A decoder, "drafted" or "plain", and the batch size -> what runs in its place.
Wrap = Callable[[Any, str, int], Generates]
# (task, conversation) -> its answers so far
Answers = dict[tuple[str, str], list[str]]


@dataclass(slots=True)
class BatchRun:
    """Everything that one batch size gave."""

    batch: int
    drafted: Arm
    baseline: Arm | None
    peak_memory_bytes: int | None = None
    memory: dict[str, int | None] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Session:
    """The loaded models and prompts of an evaluation, and what it has measured so far."""

    settings: EvalSettings
    target: Target
    head: Head | None
    conversations: list[Conversation]
    builder: RequestBuilder
    on_progress: Progress | None = None
    waves: list[list[Request]] = field(default_factory=list)
    runs: list[BatchRun] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    wraps: list[Wrap] = field(default_factory=list)
    done: int = 0
    _source: Callable[[], Drafter] | None = field(default=None, init=False, repr=False)

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted at all."""
        return self.settings.drafter != "none"

    def measure(self) -> None:
        """Runs every batch size; the first one's answers are the history of later turns."""
        for batch in self.settings.batch:
            self.runs.append(self._run(batch))

    def _run(self, batch: int) -> BatchRun:
        device = self.target.device
        environment.reset_peak_memory(device)
        drafted = Arm(self.decoder(batch, plain=not self.drafts))
        with_baseline = self.settings.baseline and self.drafts
        baseline = Arm(self.decoder(batch, plain=True)) if with_baseline else None
        arms = [drafted] if baseline is None else [baseline, drafted]
        decoders = [arm.decoder for arm in arms]
        before = environment.memory_bytes(device)
        for arm in arms:
            for wrap in self.wraps:
                arm.decoder = wrap(arm.decoder, "drafted" if arm is drafted else "plain", batch)
        if self.waves:
            self._warm_up(batch, self.waves[0], len(arms))
            for wave in self.waves:
                self._alternate(arms, wave, batch)
        else:
            self._first_run(arms, batch)
        peak = environment.peak_memory_bytes(device)
        memory = memory_of(decoders, before, peak)
        ran = {name for one in decoders for name in getattr(one, "kernels", ())}
        return BatchRun(batch, drafted, baseline, peak, memory, ran)

    def _first_run(self, arms: list[Arm], batch: int) -> None:
        """All first turns, then all second turns with the answers in front of them, and so on."""
        answers: Answers = {}
        wave = [self.builder.build(one) for one in self.conversations]
        self._warm_up(batch, wave, len(arms))
        turn = 0
        while wave:
            self.waves.append(wave)
            before = len(arms[0].responses)
            self._alternate(arms, wave, batch)
            for response in arms[0].responses[before:]:
                request = response.request
                text = self.target.tokenizer.decode(response.output_ids, skip_special_tokens=True)
                answers.setdefault((request.task, request.conversation), []).append(text)
            turn += 1
            wave = self._later_turns(turn, answers)

    def _later_turns(self, turn: int, answers: Answers) -> list[Request]:
        wave = []
        for one in self.conversations:
            known = answers[one.task, one.id]
            if len(one.turns) <= turn or len(known) < turn:
                continue
            try:
                wave.append(self.builder.build(one, turn, known))
            except HeadsmithError as fault:
                # The length depends on the answers: too late to refuse what has been measured.
                self.warnings.append(f"left out: {fault}")
        return wave

    def _alternate(self, arms: list[Arm], wave: list[Request], batch: int) -> None:
        total = sum(len(one.turns) for one in self.conversations)
        total *= len(arms) * len(self.settings.batch)

        def report(response: Response) -> None:
            self.done += 1
            if self.on_progress is not None:
                self.on_progress(self.done, total, f"batch {batch}")

        alternate(arms, wave, batch, report, whole=self.settings.arrival is not None)

    def _warm_up(self, batch: int, wave: list[Request], arms: int) -> None:
        """A few tokens that nobody counts: first calls allocate, compile and fill caches."""
        for plain in (True, False) if arms > 1 else (not self.drafts,):
            self.decoder(batch, plain=plain, max_new_tokens=8).generate(wave[:batch])

    def decoder(self, batch: int, *, plain: bool, max_new_tokens: int | None = None) -> Generates:
        """A decoder by the settings: with their drafter and draft shape, or plain."""
        from headsmith.inference.accept import GREEDY
        from headsmith.inference.engine import Decoder

        rule = self.settings.make_rule()
        return Decoder(
            self.target,
            None if plain else self._drafter(),
            batch=batch,
            max_new_tokens=max_new_tokens or self.settings.max_new_tokens,
            stop_strings=self.settings.stop,
            # A lossy rule has no plain decoding of its own: its drafts are compared with greedy.
            rule=rule if rule.lossless or not plain else GREEDY,
            arrival=self.settings.arrivals,
            prefill_chunk=self.settings.prefill_chunk,
        )

    def _drafter(self) -> Drafter:
        """A drafter of its own for a decoder."""
        from headsmith.inference.drafter_choice import FromHead, Nothing
        from headsmith.inference.make_drafter import drafter_source, make_drafter
        from headsmith.inference.tree import parse_shape

        settings = self.settings
        choice = settings.choice
        assert not isinstance(choice, Nothing)
        if isinstance(choice, FromHead):
            assert self.head is not None
            return make_drafter(
                self.head, self.target, parse_shape(settings.draft), settings.make_rule()
            )
        if self._source is None:
            self._source = drafter_source(choice, self.target, settings.draft, self.conversations)
        return self._source()


def memory_of(decoders: list[Any], before: int, peak: int | None) -> dict[str, int | None]:
    """Bytes of the drafted decoder's caches, which is the last, and of all else that came on top of
    `before`: every decoder keeps its caches until the end.
    """
    caches = [(one.cache.nbytes, getattr(one.drafter, "cache_bytes", 0)) for one in decoders]
    rest = None if peak is None else max(0, peak - before - sum(map(sum, caches)))
    return {"cache": caches[-1][0], "head_cache": caches[-1][1], "workspace": rest}
