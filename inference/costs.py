"""The cost model: what a round of the decoder costs on this machine, stage by stage, and the
speedup that follows for any tau (spec/verifier.md 4.3, 4.4). `headsmith profile` prints it.

Plain and drafted decoding take turns over the same requests, as in `headsmith eval`, while the
stages of a round are timed. The object (schema `headsmith.profile/1`), a part of `batches` for each
batch size:

    stages       of drafted rounds: stage (inference/stages.py), calls a round, ms a call (median)
                 and a round, bytes and operations that a call cannot avoid (inference/least.py),
                 bytes_per_s achieved, and `roofline`, the share of the bound that is reached: 1
                 where memory or arithmetic is never idle. Small weights can come from a cache,
                 whose speed is beyond the memory's. `rest` is the host's work between the stages
    plain        the same of plain rounds
    model        plain_ms a round; c_v the target's pass and lm_head, c_d one of `steps` draft
                 steps, c_o the rest of a round, each in plain rounds; tau as measured;
                 predicted_speedup = tau / (c_v + steps c_d + c_o); break_even, the tau of 1.
                 Where rounds stay on the device (inference/resident/) it is of those, which run
                 once more for it, since stages can be told apart in rounds of the host only: c_v
                 is then all of verification. `of` says which
    curve        predicted speedup at each whole tau that the draft can reach
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from headsmith.errors import HeadsmithError
from headsmith.files import write_json
from headsmith.inference import environment
from headsmith.inference.evaluate import load_session
from headsmith.inference.least import Setting, work_of
from headsmith.inference.machine import measure_machine
from headsmith.inference.measure import Session
from headsmith.inference.records import Request, Round
from headsmith.inference.settings import EvalSettings
from headsmith.inference.speed import Arm, alternate, ratio
from headsmith.inference.stages import Stages, watching_stages

SCHEMA = "headsmith.profile/1"
REST = "rest"


def profile(settings: EvalSettings) -> dict[str, Any]:
    """Measures what the settings name; with `out`, `profile.json` is written there."""
    if settings.drafter != "head":
        raise HeadsmithError("a profile is one of a head; add --head DIR and leave --drafter out")
    session = load_session(settings)
    requests = [session.builder.build(one) for one in session.conversations]
    machine = measure_machine(session.target.device, session.target.dtype)
    batches = [profile_batch(session, requests, batch, machine) for batch in settings.batch]
    found = {
        "schema": SCHEMA,
        "command": settings.command,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": environment.versions(),
        "device": environment.device_info(session.target.device),
        "target": session.target.path,
        "head": settings.head,
        "dtype": settings.dtype,
        "draft": settings.draft,
        "machine": machine,
        "batches": batches,
        "warnings": [*session.warnings, *session.builder.warnings],
    }
    if settings.out is not None:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        write_json(Path(settings.out) / "profile.json", found)
    return found


def profile_batch(
    session: Session, requests: Sequence[Request], batch: int, machine: dict[str, Any]
) -> dict[str, Any]:
    """The part of one batch size."""
    plain, drafted = (Watched(session, batch, plain=plain) for plain in (True, False))
    for arm in (plain, drafted):
        session.decoder(batch, plain=arm is plain, max_new_tokens=8).generate(requests[:batch])
    alternate([plain.arm, drafted.arm], requests, batch)
    for arm in (plain, drafted):
        if not arm.arm.rounds:
            raise HeadsmithError(
                "not one round was decoded; give prompts and --max-new-tokens of at least "
                f"{batch} requests that do not end at once"
            )
    model = cost_model(plain, drafted, steps_of(session))
    if drafted.decoder.device_rounds is not None:
        bases, whole = (Decoded(arm.decoder, batch) for arm in (plain, drafted))
        alternate([bases.arm, whole.arm], requests, batch)
        model = cost_model(bases, whole, steps_of(session)) | {"of": "rounds on the device"}
    at = drafted.setting(batch)
    return {
        "batch": batch,
        "kernels": sorted(drafted.decoder.kernels),
        "context": at.context,
        "rows": at.rows,
        "stages": stage_rows(drafted, session, at, machine),
        "plain": stage_rows(plain, session, plain.setting(batch), machine),
        "model": model,
        "curve": curve(model, drafted.decoder.drafter.shape.depth),
    }


class Decoded:
    """One of the two decoders as it runs."""

    def __init__(self, decoder: Any, batch: int) -> None:
        self.decoder, self.batch = decoder, batch
        self.arm = Arm(self)

    def generate(self, requests: Sequence[Request], on_response: Any = None) -> Any:
        return self.decoder.generate(requests, on_response)

    @property
    def rounds(self) -> list[Round]:
        """Those of the last call."""
        rounds: list[Round] = self.decoder.rounds
        return rounds

    @property
    def target_ms(self) -> float:
        """Milliseconds of a round that are the target's."""
        return self.per_round("verify_s")

    @property
    def full_rounds(self) -> list[Round]:
        """The full rounds, or all where none was full."""
        rounds = self.arm.rounds
        return [one for one in rounds if one.running == self.batch] or rounds

    def per_round(self, phase: str) -> float:
        """Median milliseconds of a phase in a round."""
        return 1000 * float(np.median([getattr(one.phases, phase) for one in self.full_rounds]))


class Watched(Decoded):
    """The same with its stages timed, which makes all its rounds the host's."""

    def __init__(self, session: Session, batch: int, *, plain: bool) -> None:
        super().__init__(session.decoder(batch, plain=plain), batch)
        self.stages = Stages(session.target.device)

    def generate(self, requests: Sequence[Request], on_response: Any = None) -> Any:
        with watching_stages(self.stages):
            return super().generate(requests, on_response)

    @property
    def target_ms(self) -> float:
        return per_round(self, "target pass") + per_round(self, "target lm_head")

    def setting(self, batch: int) -> Setting:
        """What its rounds looked like, on the average."""
        passes = [one for response in self.arm.responses for one in response.passes]
        lengths = [len(r.request.prompt_ids) + len(r.output_ids) / 2 for r in self.arm.responses]
        cache, drafter = self.decoder.cache, self.decoder.drafter
        spaces = cache.slots * cache.capacity
        mine = getattr(drafter, "cache_bytes", 0)
        running = float(np.mean([one.running for one in self.full_rounds]))
        topk = getattr(getattr(drafter, "shape", None), "topk", 1)
        return Setting(
            rows=running * float(np.mean([one.nodes + 1 for one in passes])),
            drafted=running * topk,
            accepted=float(np.mean([one.accepted for one in passes])),
            batch=batch,
            context=float(np.mean(lengths)),
            token_bytes=cache.nbytes / spaces,
            head_token_bytes=mine / spaces,
        )


def cost_model(plain: Decoded, drafted: Decoded, steps: int) -> dict[str, Any]:
    """c_v, c_d, c_o in plain rounds, and what they predict of the measured tau."""
    base = plain.per_round("decode_s")
    target = drafted.target_ms
    draft, whole = drafted.per_round("draft_s"), drafted.per_round("decode_s")
    tau = ratio(drafted.arm.committed, drafted.arm.passes)
    assert tau is not None
    c_v, c_d = target / base, draft / base / steps
    c_o = max(0.0, (whole - target - draft) / base)
    cost = c_v + steps * c_d + c_o
    return {
        "of": "rounds by the host",
        "plain_ms": base,
        "round_ms": whole,
        "steps": steps,
        "c_v": c_v,
        "c_d": c_d,
        "c_o": c_o,
        "tau": tau,
        "predicted_speedup": tau / cost,
        "break_even": cost,
    }


def curve(model: dict[str, Any], depth: int) -> list[dict[str, float]]:
    """The speedup of every whole tau from 1 to the most that a draft of this depth commits."""
    return [{"tau": tau, "speedup": tau / model["break_even"]} for tau in range(1, depth + 2)]


def steps_of(session: Session) -> int:
    """Draft steps of a round: Medusa heads take one, other heads one for each level."""
    assert session.head is not None
    if session.head.kind == "medusa":
        return 1
    drafter: Any = session.decoder(1, plain=False)
    depth: int = drafter.drafter.shape.depth
    return depth


def per_round(arm: Watched, stage: str) -> float:
    """Milliseconds of a stage in a round: its median call times its calls."""
    calls = arm.stages.seconds.get(stage, [])
    return 1000 * float(np.median(calls)) * len(calls) / len(arm.arm.rounds) if calls else 0.0


def stage_rows(
    arm: Watched, session: Session, at: Setting, machine: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row a stage, and one of the rest."""
    rows = []
    for stage, calls in arm.stages.seconds.items():
        median = float(np.median(calls))
        work = work_of(stage, session.target, session.head, at)
        row: dict[str, Any] = {
            "stage": stage,
            "calls": len(calls) / len(arm.arm.rounds),
            "ms_per_call": 1000 * median,
            "ms_per_round": per_round(arm, stage),
            "bytes": None,
            "flops": None,
            "bytes_per_s": None,
            "roofline": None,
        }
        if work is not None:
            bound = max(work.bytes / machine["bytes_per_s"], work.flops / machine["flops_per_s"])
            row |= {
                "bytes": work.bytes,
                "flops": work.flops,
                "bytes_per_s": ratio(work.bytes, median),
                "roofline": ratio(bound, median),
            }
        rows.append(row)
    known = sum(row["ms_per_round"] for row in rows)
    rest = max(0.0, arm.per_round("decode_s") - known)
    empty = dict.fromkeys(("calls", "ms_per_call", "bytes", "flops", "bytes_per_s", "roofline"))
    return [*rows, {"stage": REST, **empty, "ms_per_round": rest}]
