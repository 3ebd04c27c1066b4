"""On-policy data: the target itself answers prompts, greedily, with this project's engine.

Every turn is answered in order, each with the answers before it. Each finished conversation is one
line of the output, written as soon as it is done; a run that is started again goes on where it was.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headsmith.errors import HeadsmithError
from headsmith.files import write_text
from headsmith.inference.engine import Decoder
from headsmith.inference.prompts import Conversation, PromptTooLong, RequestBuilder, load_prompts
from headsmith.inference.records import Request, Response
from headsmith.models.target import Target

# Why a conversation has no line in the output.
UNUSED = ("empty", "too long")


def regenerate(
    target: Target,
    prompts: str,
    out: Path,
    *,
    max_new_tokens: int = 256,
    batch: int = 16,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Answer `prompts` into the JSONL file `out`, in the order of the prompts; returns counts.

    A line is {"id", "messages", "finish": [reason a turn]}. Conversations that `out` already holds
    are kept. An answer that is empty, or a turn that no longer fits the context, ends its
    conversation, which is then left out and counted under that reason.
    """
    conversations = load_prompts(prompts, limit=limit)
    _check_ids(conversations)
    partial = out.with_name(f".{out.name}.partial")
    begun = _read_lines(partial)
    done = _read_lines(out) | begun
    todo = [c for c in conversations if c.id not in done]
    kept = len(conversations) - len(todo)
    # Without the line that a kill cut off: what is appended would become its second half.
    _write_lines(partial, list(begun.values()))
    with open(partial, "a", encoding="utf-8") as file:

        def finished(line: dict[str, Any]) -> None:
            done[line["id"]] = line
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            if progress is not None:
                progress(sum(c.id in done for c in conversations), len(conversations))

        decoder = Decoder(target, batch=batch, max_new_tokens=max_new_tokens)
        _answer(decoder, RequestBuilder(target.tokenizer, target.max_context), todo, finished)
    lines = [done[c.id] for c in conversations if "unused" not in done[c.id]]
    _write_lines(out, lines)
    partial.unlink(missing_ok=True)
    unused = Counter(done[c.id]["unused"] for c in todo if "unused" in done[c.id])
    return {"kept": kept, "answered": len(todo) - unused.total(), **{r: unused[r] for r in UNUSED}}


def _answer(
    decoder: Decoder,
    builder: RequestBuilder,
    conversations: Sequence[Conversation],
    finished: Callable[[dict[str, Any]], None],
) -> None:
    """Answer the first turns of all, then the second ones, and so on; `finished` gets each line."""
    by_id = {c.id: c for c in conversations}
    answers: dict[str, list[str]] = {c.id: [] for c in conversations}
    reasons: dict[str, list[str]] = {c.id: [] for c in conversations}

    def collect(response: Response) -> None:
        conversation = by_id[response.request.conversation]
        text = builder.tokenizer.decode(response.output_ids, skip_special_tokens=True)
        answers[conversation.id].append(str(text).strip())
        reasons[conversation.id].append(response.finish_reason)
        given = answers[conversation.id]
        if not given[-1]:
            finished({"id": conversation.id, "unused": "empty"})
        elif len(given) == len(conversation.turns):
            finished(_line(conversation, given, reasons[conversation.id]))

    for turn in range(max((len(c.turns) for c in conversations), default=0)):
        open_ones = [c for c in conversations if len(c.turns) > turn and all(answers[c.id])]
        requests = []
        for conversation in open_ones:
            try:
                requests.append(builder.build(conversation, turn, answers[conversation.id]))
            except PromptTooLong:
                finished({"id": conversation.id, "unused": "too long"})
                answers[conversation.id].append("")
        # Alike lengths together: a pass reads every cache up to the longest of its requests.
        decoder.generate(sorted(requests, key=_length), collect)


def _length(request: Request) -> int:
    return len(request.prompt_ids)


def _line(conversation: Conversation, answers: list[str], finish: list[str]) -> dict[str, Any]:
    messages: list[dict[str, str]] = [dict(m) for m in conversation.context]
    for question, answer in zip(conversation.turns, answers, strict=True):
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return {"id": conversation.id, "messages": messages, "finish": finish}


def _check_ids(conversations: Sequence[Conversation]) -> None:
    seen: set[str] = set()
    for conversation in conversations:
        if conversation.id in seen:
            raise HeadsmithError(
                f"two conversations are called {conversation.id}; give each row an id of its own, "
                "or answer each file into one of its own"
            )
        seen.add(conversation.id)


def _write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Finished lines of an earlier run by id; a last line that was cut off by a kill is dropped."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")
    found: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            found[line["id"]] = line
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines):
                continue
            raise HeadsmithError(
                f"{path}, line {number} was not written by regenerate; move the file away"
            ) from error
    return found
