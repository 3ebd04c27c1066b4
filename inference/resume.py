"""A run with `--out` that was interrupted goes on where it stopped.

Every finished request is appended to `unfinished.jsonl` in the folder, which goes when the run's
files are written. A run of the same settings takes the finished requests from it; one of other
settings is refused, with what differs named.

Times of a resumed run come from parts: a request has the phases that passed between its end and
that of the request before it, so that sums are right, and what an interrupted request took is lost
with it. The first line of the file holds the settings, the others a part's begin or a request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headsmith.errors import HeadsmithError
from headsmith.inference.records import Pass, Phases, Request, Response

if TYPE_CHECKING:
    from headsmith.inference.measure import Session
    from headsmith.inference.speed import Generates

UNFINISHED = "unfinished.jsonl"
SCHEMA = "headsmith.unfinished/1"
# Settings that neither the text nor the counts nor the times depend on; of the prompts, which may
# be named in many ways, the texts count.
FREE = frozenset(
    "out command gate metrics_port diagnose diagnose_depth allow_mismatch prompts data_dir limit "
    "device target head".split()
)


class Timed(Protocol):
    """A decoder; `phases` are those of the call that runs or ran last, as far as it has come."""

    phases: Phases

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None] | None = None,
    ) -> tuple[list[Response], Phases]: ...


class Kept(NamedTuple):
    """A finished request, and the time between its end and that of the one before."""

    response: Response
    phases: Phases


def settings_key(session: Session, prompts_sha256: str) -> dict[str, Any]:
    """All that a run's answers and times depend on, by names that a refusal can call."""
    from headsmith.files import weights_sha256

    settings, target = session.settings, session.target
    key = {name: value for name, value in asdict(settings).items() if name not in FREE}
    key |= {
        "target": target.fingerprint(),
        "device": str(target.device),
        "head": weights_sha256(settings.head) if settings.head is not None else None,
        "prompts": prompts_sha256,
    }
    # As it is read back: tuples are lists there.
    known: dict[str, Any] = json.loads(json.dumps(key))
    return known


class Journal:
    """The finished requests of a run, in a file that is appended to as they finish.

    `parts` counts the sittings, this one included; `taken` the requests that earlier ones finished.
    """

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self.path, self.key = folder / UNFINISHED, key
        self.parts, self.taken = 1, 0
        self._kept: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._begun = False
        if self.path.is_file():
            self._read()

    def wrap(self, decoder: Timed, arm: str, batch: int) -> Generates:
        """The decoder, which takes what is finished from here and adds what it finishes."""
        return _Resuming(self, decoder, arm, batch)

    def take(self, arm: str, batch: int, request: Request) -> Kept | None:
        """What an earlier part made of this request; None when it did not finish it."""
        line = self._kept.get((arm, batch, request.name))
        if line is None or line["prompt_tokens"] != len(request.prompt_ids):
            return None
        self.taken += 1
        response = Response(
            request,
            line["output_ids"],
            line["finish_reason"],
            [Pass(*counts) for counts in line["passes"]],
            line["prefill_s"],
            line["decode_s"],
            line["token_times"],
        )
        return Kept(response, Phases(*line["phases"]))

    def add(self, arm: str, batch: int, kept: Kept) -> None:
        """Appends a finished request."""
        one = kept.response
        line = {
            "arm": arm,
            "batch": batch,
            "request": one.request.name,
            "prompt_tokens": len(one.request.prompt_ids),
            "output_ids": one.output_ids,
            "finish_reason": one.finish_reason,
            "passes": [[p.proposed, p.accepted, p.committed, p.nodes] for p in one.passes],
            "prefill_s": one.prefill_s,
            "decode_s": one.decode_s,
            "token_times": one.token_times,
            "phases": list(asdict(kept.phases).values()),
        }
        lines = [line]
        if not self._begun:
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            lines.insert(0, {"part": self.parts, "begun": now})
            if self.parts == 1:
                lines.insert(0, {"schema": SCHEMA, "settings": self.key})
            self._begun = True
        self._append(lines)

    @staticmethod
    def discard(folder: Path) -> None:
        """The run's own files are written: nothing is left to go on from."""
        (folder / UNFINISHED).unlink(missing_ok=True)

    @property
    def note(self) -> str:
        """What a resumed run must say of its times; empty for a run in one piece."""
        if not self.taken:
            return ""
        return (
            f"this run is in {self.parts} parts: {self.taken} answers are from before it was "
            "interrupted, and its time figures come from all the parts"
        )

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        with open(self.path, "ab") as file:
            file.write(text.encode())

    def _read(self) -> None:
        """Takes up what is there. A last line that was cut off by a kill is cut off for good."""
        whole, _, rest = self.path.read_bytes().rpartition(b"\n")
        try:
            lines = [json.loads(line) for line in whole.split(b"\n") if line]
            if not lines:
                return self.discard(self.path.parent)
            head, *others = lines
            if head["schema"] != SCHEMA:
                raise ValueError(head["schema"])
            self.parts += sum("part" in line for line in others)
            for line in others:
                if "request" in line:
                    self._kept[line["arm"], line["batch"], line["request"]] = line
        except (ValueError, KeyError, TypeError) as fault:
            raise HeadsmithError(
                f"{self.path} is not what an interrupted run leaves ({fault!r}); delete it to "
                "start anew"
            ) from None
        self._refuse_other(head["settings"])
        if rest:
            with open(self.path, "r+b") as file:
                file.truncate(len(whole) + 1)

    def _refuse_other(self, settings: Mapping[str, Any]) -> None:
        names = [
            name
            for name in dict.fromkeys([*settings, *self.key])
            if settings.get(name) != self.key.get(name)
        ]
        if names:
            raise HeadsmithError(
                f"{self.path} holds {len(self._kept)} finished requests of an interrupted run "
                f"with another {', '.join(names)}; go on with its settings, choose another "
                "--out, or delete that file to start anew"
            )


class _Resuming:
    """A decoder of one arm and batch size that only decodes what the journal does not hold."""

    def __init__(self, journal: Journal, decoder: Timed, arm: str, batch: int) -> None:
        self.journal, self.decoder, self.arm, self.batch = journal, decoder, arm, batch

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None] | None = None,
    ) -> tuple[list[Response], Phases]:
        told = on_response or (lambda response: None)
        known: dict[str, Kept] = {}
        for request in requests:
            kept = self.journal.take(self.arm, self.batch, request)
            if kept is not None:
                known[request.name] = kept
                told(kept.response)
        fresh = [request for request in requests if request.name not in known]
        before = Phases()

        def finished(response: Response) -> None:
            nonlocal before
            now = replace(self.decoder.phases)
            self.journal.add(self.arm, self.batch, Kept(response, now - before))
            before = now
            told(response)

        made, phases = self.decoder.generate(fresh, finished) if fresh else ([], Phases())
        responses = {one.request.name: one for one in made}
        responses |= {name: kept.response for name, kept in known.items()}
        total = sum((kept.phases for kept in known.values()), phases)
        return [responses[request.name] for request in requests], total


@contextmanager
def saying_what_is_kept(out: str | None) -> Iterator[None]:
    """On Ctrl-C, one line on stderr says what there is to go on from."""
    try:
        yield
    except KeyboardInterrupt:
        path = Path(out) / UNFINISHED if out is not None else None
        if path is not None and path.is_file():
            kept = path.read_bytes().count(b'{"arm": ')
            print(
                f"headsmith: {kept} finished requests are kept in {path}; the same command goes "
                "on from there",
                file=sys.stderr,
            )
        raise
