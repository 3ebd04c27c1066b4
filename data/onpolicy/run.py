"""Conversations through an answerer, turn after turn, each behind the answers before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headsmith.data.chats import line_of
from headsmith.data.lines import check_out
from headsmith.data.onpolicy.asking import ANSWERED, Answer, Answerer, Ask
from headsmith.data.onpolicy.dialogues import Dialogue
from headsmith.data.onpolicy.journal import Course, Journal
from headsmith.files import write_atomic

# Conversations whose next turns are asked together. Enough for any engine to keep busy.
_CHUNK = 2048
# Called with answers there are, and answers there are to be.
Progress = Callable[[int, int], None]
Choice = Literal["keep", "drop"]


@dataclass(slots=True)
class Regenerated:
    """What became of the conversations.

    `kept` were done before, `answered` are new; both are in the output. `cut` of all in the output
    have an answer that a limit ended, `partial` of them end before their last answer. `left_out`
    counts the others by why: a status, or that an answer is `cut` when such are dropped. `details`
    has what was said of one conversation of each.
    """

    kept: int = 0
    answered: int = 0
    cut: int = 0
    partial: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)


def regenerate(
    dialogues: Sequence[Dialogue],
    answerer: Callable[[], Answerer],
    out: Path,
    settings: Mapping[str, Any],
    *,
    unfinished: Choice = "drop",
    cut: Choice = "keep",
    progress: Progress | None = None,
) -> Regenerated:
    """Answer every turn of `dialogues` and write them to the JSONL file `out`, in their order.

    A line is {"id", "status", "finish": [status of each answer], "messages"}; status is `length`
    when a limit cut an answer, and `partial` when the conversation ends before its last answer,
    which `unfinished` keep allows. `cut` drop leaves out what a limit cut. `answerer` is called
    when there is something to ask. `settings` are what the texts depend on.

    Every answer is in the journal beside `out` as soon as it is there; the same call goes on from
    it. Conversations that a server failed to answer are asked again, others that have no answer
    are not.
    """
    check_out(out)
    with Journal(out, settings) as journal:
        before = {one.key for one in dialogues if not _open(one, journal.course(one.key))}
        waiting = [one for one in dialogues if one.key not in before]
        if waiting:
            _answer_all(waiting, dialogues, answerer(), journal, progress)
        result = Regenerated()
        lines = _lines(dialogues, journal, before, (unfinished, cut), result)
        write_atomic(out, lambda path: _write(path, lines))
    return result


def _open(one: Dialogue, course: Course) -> bool:
    return course.ended is None and len(course.places) < len(one.parts)


def _answer_all(
    waiting: Sequence[Dialogue],
    dialogues: Sequence[Dialogue],
    answerer: Answerer,
    journal: Journal,
    progress: Progress | None,
) -> None:
    total = sum(len(one.parts) for one in dialogues)
    turns = {one.key: len(one.parts) for one in dialogues}
    done = sum(
        len(journal.course(key).places) if journal.course(key).ended is None else number
        for key, number in turns.items()
    )

    def finished(ask: Ask, answer: Answer) -> None:
        nonlocal done
        journal.add(ask, answer)
        # A conversation that ends early is done with all its turns.
        done += 1 if answer.status in ANSWERED else turns[ask.key] - ask.turn
        if progress is not None:
            progress(done, total)

    if progress is not None:
        progress(done, total)
    for start in range(0, len(waiting), _CHUNK):
        chunk = list(waiting[start : start + _CHUNK])
        while chunk:
            asks = [_ask(one, journal.answers(one.key)) for one in chunk]
            answerer.answer(asks, finished)
            chunk = [one for one in chunk if _open(one, journal.course(one.key))]


def _ask(one: Dialogue, answers: Sequence[str]) -> Ask:
    return Ask(one.key, len(answers), one.history(answers))


def _lines(
    dialogues: Sequence[Dialogue],
    journal: Journal,
    before: set[str],
    choices: tuple[Choice, Choice],
    result: Regenerated,
) -> Iterator[bytes]:
    """The lines of the output; what becomes of each conversation is counted on the way."""
    unfinished, cut = choices
    for one in dialogues:
        course = journal.course(one.key)
        reason = _reason_against(course, unfinished, cut)
        if reason:
            result.left_out[reason] += 1
            if course.ended is not None and course.ended.detail:
                result.details.setdefault(reason, course.ended.detail)
            continue
        result.kept += one.key in before
        result.answered += one.key not in before
        result.cut += "length" in course.finish
        result.partial += course.ended is not None
        status = "length" if "length" in course.finish else "ok"
        yield line_of(
            {
                "id": one.id,
                "status": "partial" if course.ended is not None else status,
                "finish": course.finish,
                "messages": one.answered(journal.answers(one.key)),
            }
        )


def _write(path: Path, lines: Iterator[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(lines)


def _reason_against(course: Course, unfinished: Choice, cut: Choice) -> str:
    """Why a conversation is not in the output; empty if it is."""
    if course.ended is not None and (unfinished == "drop" or not course.places):
        return course.ended.status
    return "cut" if cut == "drop" and "length" in course.finish else ""
