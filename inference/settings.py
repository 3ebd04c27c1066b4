"""What `headsmith eval` is asked to measure, checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headsmith.errors import HeadsmithError
from headsmith.inference.arrival import Arrival, parse_arrival
from headsmith.inference.drafter_choice import (
    Choice,
    FromHead,
    Lookahead,
    Nothing,
    check_draft,
    parse_drafter,
)
from headsmith.inference.prompts import DEFAULT_TASK
from headsmith.inference.sampling import Shaping, parse_bias, refuse_for

if TYPE_CHECKING:
    from headsmith.inference.accept import Rule

RULES = ("greedy", "sample", "ratio", "typical")
DIAGNOSES = ("drift",)
DTYPE_NAMES = ("float32", "bfloat16", "float16")


@dataclass(slots=True)
class EvalSettings:
    """What to measure, and how; HeadsmithError names the option that cannot be used.

    `target` None: the one that the head's headsmith.json names. `prompts` as in `load_prompts`,
    `draft` as in `parse_shape` ("" is chain:4), `drafter` as in `parse_drafter`, `limit` prompts of
    each source, `batch` sizes measured in turn, `context` lengths that the prompts are brought to,
    `diagnose_depth` of the chains of `diagnose`.
    `arrival` as in `parse_arrival` measures a queue, whose concurrency `batch` limits; None takes
    requests as slots become free. `prefill_chunk` is the most prompt tokens of a pass.
    `gate` a file of bounds (`gate.load_gate`), `metrics_port` where counters of the run are served.
    `temperature` None is 0 for greedy, else 1; the `posterior_` two as in `accept.Typical`; from
    `top_k` to `logit_bias` (`ID=VALUE` texts) as in `sampling.Shaping`.
    """

    target: str | None = None
    head: str | None = None
    prompts: str = DEFAULT_TASK
    data_dir: str | None = None
    draft: str = ""
    drafter: str = "head"
    rule: str = "greedy"
    temperature: float | None = None
    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[str, ...] = ()
    max_new_tokens: int = 128
    batch: tuple[int, ...] = (1,)
    dtype: str = "float32"
    device: str = "auto"
    baseline: bool = True
    seed: int = 0
    system_prompt: str | None = None
    stop: tuple[str, ...] = ()
    limit: int | None = None
    out: str | None = None
    allow_mismatch: bool = False
    threads: int | None = None
    context: tuple[int, ...] = ()
    diagnose: str | None = None
    diagnose_depth: int = 8
    gate: str | None = None
    metrics_port: int | None = None
    arrival: str | None = None
    prefill_chunk: int | None = None
    command: str = ""

    def __post_init__(self) -> None:
        _one_of("rule", self.rule, RULES)
        _one_of("dtype", self.dtype, DTYPE_NAMES)
        self._check_rule()
        if not self.batch or len(set(self.batch)) != len(self.batch):
            raise HeadsmithError(f"batch is {self.batch}; name each batch size once, such as 1,4,8")
        counts = [("batch", size) for size in self.batch]
        counts += [("max-new-tokens", self.max_new_tokens)]
        counts += [("context", tokens) for tokens in self.context]
        counts += [("diagnose-depth", self.diagnose_depth)]
        counts += [("limit", self.limit)] if self.limit is not None else []
        given = [("threads", self.threads), ("prefill-chunk", self.prefill_chunk)]
        counts += [(name, value) for name, value in given if value is not None]
        for name, value in counts:
            if value < 1:
                raise HeadsmithError(f"{name} is {value}; it must be 1 or more")
        if len(set(self.context)) != len(self.context):
            raise HeadsmithError(f"context is {self.context}; name each length once")
        if self.diagnose is not None:
            _one_of("diagnose", self.diagnose, DIAGNOSES)
            if self.drafter != "head":
                raise HeadsmithError(f"{self.diagnose} is diagnosed of a head; add --head DIR")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 65536:
            raise HeadsmithError(f"metrics-port is {self.metrics_port}; ports are 0 to 65535")
        if self.out is not None and Path(self.out).exists() and not Path(self.out).is_dir():
            raise HeadsmithError(f"out is {self.out}, which is a file; name a folder")
        if any(not text for text in self.stop):
            raise HeadsmithError("a stop string is empty; it would end every answer at once")
        if self.arrival is not None:
            self.arrival = str(parse_arrival(self.arrival))
        self._check_draft()
        if self.drafter == "head":
            self._check_head()
        elif not self.target:
            raise HeadsmithError(
                "without a head there is nothing that names the target; add --target"
            )

    def _check_rule(self) -> None:
        given, name = self.temperature, self.rule
        if given is not None and not 0 <= given < math.inf:
            raise HeadsmithError(f"temperature is {given}; it must be 0 or more")
        if name == "greedy" and given:
            raise HeadsmithError(
                f"rule greedy has no temperature, but {given} was asked for; add --rule sample"
            )
        bars = {"threshold": self.posterior_threshold, "alpha": self.posterior_alpha}
        for key, value in bars.items():
            if value is None:
                continue
            if name != "typical":
                raise HeadsmithError(
                    f"posterior-{key} means nothing for rule {name}; add --rule typical"
                )
            if not 0 < value <= 1:
                raise HeadsmithError(f"posterior-{key} is {value}; it must be above 0, at most 1")
        refuse_for(name, self.shaping)
        if name == "typical" and self.drafter != "head":
            raise HeadsmithError("rule typical judges the drafts of a head; add --head DIR")

    def make_rule(self) -> Rule:
        """The rule that accepts drafts and chooses tokens."""
        from headsmith.inference.accept import POSTERIOR_THRESHOLD
        from headsmith.inference.rules import make_rule

        return make_rule(
            self.rule,
            self.used_temperature,
            seed=self.seed,
            shaping=self.shaping,
            threshold=self.posterior_threshold or POSTERIOR_THRESHOLD,
            alpha=self.posterior_alpha,
        )

    @property
    def shaping(self) -> Shaping:
        """The sampling settings besides temperature; HeadsmithError for one that is none."""
        given = {
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition": self.repetition_penalty,
            "presence": self.presence_penalty,
            "frequency": self.frequency_penalty,
        }
        known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return Shaping(bias=parse_bias(self.logit_bias), **known)

    @property
    def used_temperature(self) -> float:
        """What a temperature that was not given means."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.rule == "greedy" else 1.0

    @property
    def arrivals(self) -> Arrival:
        """When requests arrive."""
        return parse_arrival(self.arrival or "all", self.seed)

    @property
    def choice(self) -> Choice:
        """What drafts, with its options."""
        return parse_drafter(self.drafter)

    def _check_draft(self) -> None:
        """The drafter in its whole form, and a draft shape that it can fill."""
        choice = self.choice
        self.drafter = str(choice)
        if not self.draft and not isinstance(choice, Lookahead):
            self.draft = "chain:4"
        if not self.draft or isinstance(choice, Nothing):
            return
        from headsmith.inference.tree import parse_shape

        shape = parse_shape(self.draft)
        if not isinstance(choice, FromHead):
            check_draft(choice, shape)

    def _check_head(self) -> None:
        if not self.head:
            raise HeadsmithError("which head? add --head DIR, or --drafter none for plain decoding")
        from headsmith.models.hub.client import is_repo

        if not Path(self.head).is_dir() and not is_repo(self.head):
            raise HeadsmithError(f"there is no head in {self.head}: not a folder")


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise HeadsmithError(f"{name} is {value!r}; it can be {', '.join(allowed)}")
