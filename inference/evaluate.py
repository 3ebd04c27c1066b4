"""`evaluate`: run the decoder on prompts and put everything that was measured into one object.

The object is `result.json` (schema `headsmith.result/1`); a figure that was not measured is None.
With `out` set, `result.json`, `steps.jsonl`, `responses.jsonl` and the report (`report_files`) are
written there atomically, and `drift.csv` and `drift.png` where drift was diagnosed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headsmith.errors import EqualityFailed, HeadsmithError
from headsmith.inference.context import bring_to
from headsmith.inference.counters import served
from headsmith.inference.gate import Bound, check_names, judge, load_gate
from headsmith.inference.measure import Progress, Session
from headsmith.inference.metrics import as_steps
from headsmith.inference.prompts import RequestBuilder, load_prompts, prompts_sha256
from headsmith.inference.records import Request, Steps
from headsmith.inference.result import build_result, write_results
from headsmith.inference.resume import Journal, settings_key
from headsmith.inference.settings import EvalSettings

if TYPE_CHECKING:
    from headsmith.inference.tree import Draft
    from headsmith.models.heads import Head
    from headsmith.models.target import Target

__all__ = [
    "EvalSettings",
    "evaluate",
    "load_session",
    "quick_steps",
    "raise_if_unequal",
    "run_session",
]


def evaluate(settings: EvalSettings, on_progress: Progress | None = None) -> dict[str, Any]:
    """Measures what `settings` asks for; returns the object of `result.json`.

    `on_progress(done, total, label)` counts requests. An output that is not the target's own does
    not raise here, so that everything is measured and written first: see `raise_if_unequal`.
    Raises HeadsmithError for what cannot be used, EnvironmentFault for the machine's faults.
    """
    bounds = load_gate(settings.gate) if settings.gate is not None else []
    if settings.metrics_port is not None:
        # What cannot be served is said before anything is loaded.
        import prometheus_client  # noqa: F401
    session = load_session(settings, on_progress)
    check_names(bounds, (one.task for one in session.conversations), settings.batch)
    return run_session(session, bounds)


def load_session(settings: EvalSettings, on_progress: Progress | None = None) -> Session:
    """The models and prompts that the settings name, loaded and checked, with nothing measured."""
    conversations = load_prompts(settings.prompts, data_dir=settings.data_dir, limit=settings.limit)
    target, head, warnings = load_pair(settings)
    builder = RequestBuilder(target.tokenizer, target.max_context, settings.system_prompt)
    if settings.context:
        conversations, left_out = bring_to(conversations, builder, settings.context)
        warnings += left_out
    session = Session(settings, target, head, conversations, builder, on_progress)
    session.warnings += warnings
    return session


def run_session(session: Session, bounds: Sequence[Bound] = ()) -> dict[str, Any]:
    """Measures a session and writes what it gave; returns the object of `result.json`."""
    settings, result = session.settings, _measure(session)
    if bounds:
        result["gate"] = judge(bounds, result)
    if settings.out is not None:
        write_results(Path(settings.out), result, session)
        Journal.discard(Path(settings.out))
    return result


def raise_if_unequal(result: dict[str, Any]) -> None:
    """EqualityFailed (exit code 3) when an output token is not the target's own choice, or could
    not be its draw.
    """
    drawn = result.get("distribution")
    if drawn and drawn["impossible"]:
        raise EqualityFailed(
            f"{drawn['impossible']} of {drawn['tokens']} output tokens could not be drawn from the "
            "target under these settings; this is a fault of the decoder, not of the head"
        )
    equality = result["equality"]
    if equality and equality["fails"]:
        raise EqualityFailed(
            f"{equality['fails']} of {equality['checked']} output tokens are not the target's own "
            f"(first: {json.dumps(equality['first_divergence'])}); this is a fault of the decoder, "
            "not of the head"
        )


def _measure(session: Session) -> dict[str, Any]:
    """Everything that is asked for. `diagnosis` is in the result only where one was."""
    settings = session.settings
    if settings.diagnose is None:
        _run(session)
        return build_result(session)
    from headsmith.inference.diagnose import check_diagnosis, diagnose

    check_diagnosis(session.head)
    _run(session)
    diagnosis = diagnose(session)
    return build_result(session) | {"diagnosis": diagnosis}


def _run(session: Session) -> None:
    """Measures: with `out`, from where an interrupted run stopped; with a port, counted there."""
    settings, journal = session.settings, None
    with ExitStack() as stack:
        if settings.out is not None:
            key = settings_key(session, prompts_sha256(session.conversations))
            journal = Journal(Path(settings.out), key)
            # A queue that was interrupted is another queue: such a run starts anew.
            if settings.arrival is None:
                session.wraps.append(journal.wrap)
        if settings.metrics_port is not None:
            model = settings.head or session.target.path
            counters = stack.enter_context(served(model, settings.metrics_port))
            session.wraps.append(counters.wrap)
        session.measure()
    if journal is not None and journal.note:
        session.warnings.append(journal.note)


def quick_steps(
    target: Target,
    head: Head,
    requests: Sequence[Request],
    shape: Draft,
    max_new_tokens: int,
    *,
    batch: int = 8,
) -> list[Steps]:
    """The counts of one greedy pass over `requests`, without baseline or equality."""
    from headsmith.inference.engine import Decoder
    from headsmith.inference.make_drafter import make_drafter

    drafter = make_drafter(head, target, shape)
    decoder = Decoder(target, drafter, batch=batch, max_new_tokens=max_new_tokens)
    return as_steps(decoder.generate(requests)[0])


def load_pair(settings: EvalSettings) -> tuple[Target, Head | None, list[str]]:
    """The target, the head that belongs to it, and what a mismatch that is allowed warns of."""
    if settings.drafter != "head":
        return load_target(settings), None, []
    from headsmith.models.doctor.examine import vet
    from headsmith.models.hub.pull import local_head

    assert settings.head is not None
    settings.head = str(local_head(settings.head))
    # Before the target is loaded, which may take minutes.
    path, revision = _target_of(settings)
    found = vet(settings.head, path, revision, settings.allow_mismatch)
    target = load_target(settings)
    head, warnings = load_matching_head(settings, target)
    return target, head, list(dict.fromkeys([*found, *warnings]))


def load_target(settings: EvalSettings) -> Target:
    """The target that the settings name, or else their head."""
    import torch

    from headsmith.inference.environment import DTYPES, pick_device
    from headsmith.models.target import Target

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    dtype, device = DTYPES[settings.dtype], pick_device(settings.device)
    path, revision = _target_of(settings)
    return Target.load(path, revision=revision, dtype=dtype, device=device)


def load_matching_head(settings: EvalSettings, target: Target) -> tuple[Head, list[str]]:
    """The head, which must belong to the target, and what a mismatch that is allowed warns of."""
    from headsmith.models.heads import load_head
    from headsmith.models.provenance import check_pair

    assert settings.head is not None
    warnings = check_pair(target, settings.head, settings.allow_mismatch)
    head = load_head(settings.head, target, dtype=target.dtype, device=target.device)
    return head.eval(), list(warnings or [])


def _target_of(settings: EvalSettings) -> tuple[str, str | None]:
    """Path and revision of the target that the settings name, or else the head's headsmith.json."""
    if settings.target is not None:
        return settings.target, None
    head = Path(settings.head or "")
    try:
        target = json.loads((head / "headsmith.json").read_text(encoding="utf-8"))["target"]
        return str(target["path"]), target.get("revision")
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise HeadsmithError(
            f"{head} has no headsmith.json that names its target; add --target"
        ) from fault
