"""`result.json`, `steps.jsonl` and `responses.jsonl` from a measured session."""

from __future__ import annotations

import json
import os.path
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from headsmith.files import atomic_files, weights_sha256, write_json, write_text
from headsmith.inference import environment
from headsmith.inference.accept import Rule, Typical
from headsmith.inference.advice import advise_all
from headsmith.inference.deciles import compare_deciles, decile_warnings
from headsmith.inference.degenerate import degenerate_warning, find_degenerate
from headsmith.inference.diagnose_report import write_diagnosis
from headsmith.inference.load import load_row
from headsmith.inference.measure import BatchRun, Session
from headsmith.inference.metrics import by_task, equivalents, summarise
from headsmith.inference.prompts import prompts_sha256, template_sha256
from headsmith.inference.ratio import Ratio
from headsmith.inference.records import RESULT_SCHEMA, Response, Steps
from headsmith.inference.report_files import drop_stale_plots, write_report
from headsmith.inference.speed import speed_row

# Fewer conversations than this leave tau uncertain by a tenth (spec/verifier.md D10).
FEW_CONVERSATIONS = 40


def build_result(session: Session) -> dict[str, Any]:
    """The object of `result.json`; acceptance figures are those of the first batch size."""
    settings = session.settings
    drafted = session.runs[0].drafted.responses
    overall = summarise(drafted, seed=settings.seed)
    rule = settings.make_rule()
    result = {
        "schema": RESULT_SCHEMA,
        "command": settings.command,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": environment.versions(),
        "device": environment.device_info(session.target.device) | {"kernels": _kernels(session)},
        "target": _describe_target(session),
        "head": _describe_head(session),
        "setup": _describe_setup(session, rule),
        "tasks": by_task(drafted, seed=settings.seed),
        "overall": overall,
        "speed": [_speed(session, run) for run in session.runs],
        "equality": _equality(session, rule) if rule.coupled else None,
        "distribution": _distribution(session, rule) if isinstance(rule, Ratio) else None,
        "lossy": None if rule.lossless else _lossy(session),
        "equivalents": equivalents(drafted),
    }
    decode = partial(session.target.tokenizer.decode, skip_special_tokens=True)
    result |= {
        "advice": advise_all(drafted, seed=settings.seed),
        "deciles": compare_deciles(drafted, seed=settings.seed),
        "degenerate": find_degenerate(drafted, decode),
    }
    return result | {"warnings": list(_warnings(session, result))}


def write_results(out: Path, result: dict[str, Any], session: Session) -> None:
    """Writes the three files, the report and a diagnosis' own into `out`: all or, if that fails,
    none.
    """
    responses = session.runs[0].drafted.responses
    tokenizer = session.target.tokenizer
    answers = (
        {
            "id": one.request.id,
            "task": one.request.task,
            "finish_reason": one.finish_reason,
            "text": tokenizer.decode(one.output_ids, skip_special_tokens=True),
            "prompt_ids": one.request.prompt_ids,
            "output_ids": one.output_ids,
        }
        for one in responses
    )
    with atomic_files(out) as folder:
        write_text(folder / "steps.jsonl", _lines(Steps.of(one).to_json() for one in responses))
        write_text(folder / "responses.jsonl", _lines(answers))
        write_json(folder / "result.json", result)
        if "diagnosis" in result:
            write_diagnosis(folder, result["diagnosis"])
        write_report(folder, result)
        written = {path.name for path in folder.iterdir()}
    drop_stale_plots(out, written)


def _kernels(session: Session) -> str:
    """Which kernels ran, of those of docs/kernels.md; the rest was plain PyTorch."""
    ran = sorted({name for run in session.runs for name in run.kernels})
    return ", ".join(ran) or "none, plain PyTorch"


def _describe_target(session: Session) -> dict[str, Any]:
    target = session.target
    return {
        "path": target.path,
        "revision": target.revision,
        "fingerprint": target.fingerprint(),
        "dtype": session.settings.dtype,
        "parameters": _parameters(session),
    }


def _parameters(session: Session) -> int:
    """Parameters of the target: packed weights are none of torch's, a tied head counts once."""
    from headsmith.models.linear import PackedLinear, parameters_below

    model, head = session.target.model, session.target.head_weight
    count = parameters_below(model)
    tied = head.data_ptr() in {one.data_ptr() for one in model.parameters()}
    packed = isinstance(model.get_output_embeddings(), PackedLinear)
    return count - head.numel() if tied and packed else count


def _describe_head(session: Session) -> dict[str, Any] | None:
    head, path = session.head, session.settings.head
    if head is None or path is None:
        return None
    return {
        "path": path,
        "kind": head.kind,
        "sha256": weights_sha256(path),
        "taps": list(head.taps),
        "draft_vocab": len(head.draft_ids),
        "parameters": sum(one.numel() for one in head.parameters()),
    }


def _describe_setup(session: Session, rule: Rule) -> dict[str, Any]:
    settings = session.settings
    return {
        "drafter": settings.drafter,
        "rule": settings.rule,
        "draft": settings.draft or None if session.drafts else None,
        "lossless": rule.lossless,
        "temperature": settings.used_temperature,
        "posterior_threshold": rule.threshold if isinstance(rule, Typical) else None,
        "posterior_alpha": rule.relaxation if isinstance(rule, Typical) else None,
        **settings.shaping.describe(),
        "seed": settings.seed,
        "max_new_tokens": settings.max_new_tokens,
        "batch": list(settings.batch),
        "template_sha256": template_sha256(session.target.tokenizer),
        "system_prompt": settings.system_prompt,
        "prompts": settings.prompts,
        "prompts_sha256": prompts_sha256(session.conversations),
        "stop": list(settings.stop),
        "context": list(settings.context),
        "arrival": settings.arrival,
        "prefill_chunk": settings.prefill_chunk,
    }


def _speed(session: Session, run: BatchRun) -> dict[str, Any]:
    head = session.head
    size = None
    if head is not None:
        size = sum(one.numel() * one.element_size() for one in head.parameters())
    row = speed_row(
        run.drafted,
        run.baseline,
        batch=run.batch,
        peak_memory_bytes=run.peak_memory_bytes,
        head_bytes=size,
    )
    metrics = summarise(run.drafted.responses, seed=session.settings.seed)
    if session.settings.arrival is not None:
        held = {"target": _parameters(session) * session.target.dtype.itemsize, "head": size or 0}
        row["load"] = load_row(
            run.drafted,
            run.baseline,
            batch=run.batch,
            arrival=session.settings.arrivals,
            memory=held | run.memory,
        )
        # One chunk predicts itself; full rounds do not.
        row["predicted_speedup"] = row["load"]["predicted_speedup"]
    return row | {"tau": metrics["tau"], "tau_ci": metrics["tau_ci"]}


def _distinct(session: Session) -> list[Response]:
    """Every distinct output. Prompts alike are drawn for apart, so outputs go by name too."""
    distinct: dict[tuple[str, tuple[int, ...]], Response] = {}
    for run in session.runs:
        for one in run.drafted.responses:
            distinct[one.request.name, tuple(one.output_ids)] = one
    return list(distinct.values())


def _distribution(session: Session, rule: Ratio) -> dict[str, Any]:
    """Whether the outputs could be the target's own draws."""
    from headsmith.inference.distribution import check_distribution

    return asdict(check_distribution(session.target, _distinct(session), rule))


def _equality(session: Session, rule: Rule) -> dict[str, Any]:
    """The margin check over every distinct output, and how many equal the baseline's."""
    from headsmith.inference.equality import check_equality

    compared = [
        (mine.output_ids, plain.output_ids)
        for run in session.runs
        if run.baseline is not None
        for mine, plain in zip(run.drafted.responses, run.baseline.responses, strict=True)
    ]
    return asdict(check_equality(session.target, _distinct(session), rule=rule)) | {
        "compared_to_baseline": len(compared),
        "identical_to_baseline": sum(mine == plain for mine, plain in compared),
    }


def _lossy(session: Session) -> dict[str, Any]:
    """How far a lossy rule leads away from the target: what the target thinks of its outputs and of
    plain greedy ones, and how long they are the same.
    """
    from headsmith.inference.equality import likelihood

    run = session.runs[0]
    plain = run.baseline.responses if run.baseline is not None else []
    pairs = [
        (mine.output_ids, other.output_ids)
        for mine, other in zip(run.drafted.responses, plain, strict=bool(plain))
    ]
    same = sum(len(os.path.commonprefix(pair)) for pair in pairs)
    ours, theirs = (likelihood(session.target, some) for some in (run.drafted.responses, plain))
    return {
        "rule": session.settings.rule,
        "tokens": ours.tokens,
        "first_choice": _share(ours.first_choices, ours.tokens),
        "mean_log_likelihood": _share(ours.log_likelihood, ours.tokens),
        "greedy_mean_log_likelihood": _share(theirs.log_likelihood, theirs.tokens),
        "compared_to_greedy": len(pairs),
        "identical_to_greedy": sum(mine == other for mine, other in pairs),
        "same_as_greedy_until": _share(same, sum(len(other) for _, other in pairs)),
    }


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None


def _warnings(session: Session, result: dict[str, Any]) -> Iterable[str]:
    overall, degenerate, deciles = (result[key] for key in ("overall", "degenerate", "deciles"))
    yield from session.warnings
    yield from session.builder.warnings
    first, *others = session.runs
    count = len({(r.request.task, r.request.conversation) for r in first.drafted.responses})
    if count < FEW_CONVERSATIONS and session.drafts:
        yield (
            f"tau rests on {count} conversations; its interval is wide below {FEW_CONVERSATIONS}, "
            "and comparing two heads takes 80 or more"
        )
    for run in others:
        changed = _differing(first.drafted.responses, run.drafted.responses)
        if changed:
            yield (
                f"{changed} outputs at batch {run.batch} differ from those at batch {first.batch}"
            )
    for line in (degenerate_warning(degenerate, overall["requests"]), *decile_warnings(deciles)):
        if line:
            yield line


def _differing(some: Sequence[Response], others: Sequence[Response]) -> int:
    return sum(a.output_ids != b.output_ids for a, b in zip(some, others, strict=True))


def _lines(objects: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in objects)
