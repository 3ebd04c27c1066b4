"""One pass over the conversations: render, tokenise, judge, write; every one is counted."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headsmith.data.mask import Masker
from headsmith.data.read import Conversations, Message
from headsmith.data.template import Span, TemplateRefused
from headsmith.data.token_rows import TokenRow
from headsmith.errors import HeadsmithError

HELD_OUT = "held-out.jsonl"
Rendered = tuple[str, list[Span]]
# Texts given to the tokenizer in one call: enough for it to work in parallel.
_BATCH = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the prepared rows; each field changes the folder's hash."""

    max_length: int = 2048
    max_rows: int | None = None
    min_trained: int = 2
    overlong: Literal["cut", "drop"] = "cut"
    held_out: float = 0.0

    def __post_init__(self) -> None:
        if self.max_length < 3:
            raise HeadsmithError(f"max_length is {self.max_length}; it must be at least 3 tokens")
        if self.max_rows is not None and self.max_rows < 1:
            raise HeadsmithError(f"max_rows is {self.max_rows}; it must be at least 1, or unset")
        if self.min_trained < 2:
            raise HeadsmithError(f"min_trained is {self.min_trained}; it must be at least 2 tokens")
        if self.overlong not in ("cut", "drop"):
            raise HeadsmithError(f"overlong is {self.overlong!r}; it must be cut or drop")
        if not 0 <= self.held_out < 1:
            raise HeadsmithError(f"held_out is {self.held_out}; it must be in [0, 1)")


@dataclass(slots=True)
class RowWriter:
    """Turns conversations into the rows of a folder; `info` says what became of them."""

    conversations: Conversations
    masker: Masker
    limits: Limits
    progress: Callable[[float | None, int], None] | None
    counts: Counter[str] = field(default_factory=Counter)
    held_out: list[list[Message]] = field(default_factory=list)
    read: int = 0
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    refusal: str = ""
    seen: set[bytes] = field(default_factory=set)

    def write(self, folder: Path) -> None:
        """Fill `folder` with the rows; raises HeadsmithError if there are none."""
        import datasets

        # datasets refuses to save into the folder that it reads from.
        stream = folder / "stream" / "rows.arrow"
        stream.parent.mkdir()
        _write_stream(stream, self._batches())
        if not self.rows:
            raise HeadsmithError(self._why_nothing())
        with _no_progress_bars():
            rows = datasets.Dataset.from_file(str(stream))
            rows.save_to_disk(str(folder))
        shutil.rmtree(stream.parent)
        if self.held_out:
            lines = (
                json.dumps({"id": f"held-out-{i}", "messages": messages}, ensure_ascii=False)
                for i, messages in enumerate(self.held_out)
            )
            (folder / HELD_OUT).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def info(self) -> dict[str, Any]:
        notes = self.conversations
        return {
            "origin": notes.source,
            "rows": self.rows,
            "tokens": self.tokens,
            "trained_tokens": self.trained,
            "cut": self.cut,
            "held_out": len(self.held_out),
            "read": self.read + sum(notes.skipped.values()),
            "counts": dict((notes.skipped + self.counts).most_common()),
            "roles": dict(notes.roles.most_common(20)),
            "warnings": notes.warnings,
        }

    def _batches(self) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
        found = self._found()
        while batch := list(islice(found, min(_BATCH, self._wanted()))):
            yield [row for ids, mask in self._encoded(batch) if (row := self._take(ids, mask))]
            if self.progress:
                self.progress(self.conversations.progress, self.rows)

    def _wanted(self) -> int:
        """Rows still to find; nothing is read that would not be used or counted."""
        return _BATCH if self.limits.max_rows is None else self.limits.max_rows - self.rows

    def _encoded(self, batch: list[Rendered | TokenRow]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids and mask of each, in order; the texts among them in one call of the tokenizer."""
        rendered = [one for one in batch if not isinstance(one, TokenRow)]
        texts, spans = zip(*rendered, strict=True) if rendered else ((), ())
        encoded = iter(self.masker.tokenize(texts, spans) if texts else ())
        return (one if isinstance(one, TokenRow) else next(encoded) for one in batch)

    def _found(self) -> Iterator[Rendered | TokenRow]:
        for row in self.conversations.rows(len(self.masker.tokenizer)):
            self.read += 1
            if isinstance(row, TokenRow):
                self._check_nothing_held_out()
                yield row
                continue
            if self._is_held_out(row):
                self.held_out.append(_up_to_last(row, "user"))
                continue
            try:
                yield self.masker.template.render(_up_to_last(row, "assistant"))
            except TemplateRefused as refusal:
                self.refusal = self.refusal or str(refusal)
                self.counts["the chat template refuses it"] += 1

    def _is_held_out(self, messages: list[Message]) -> bool:
        # By the question, not the conversation: two answers to one question stay together.
        question = next(m["content"] for m in messages if m["role"] == "user")
        digest = hashlib.blake2b(question.encode("utf-8", "replace"), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.limits.held_out * 2**64

    def _check_nothing_held_out(self) -> None:
        if self.limits.held_out:
            raise HeadsmithError(
                f"{self.conversations.source} holds token ids, of which no prompts can be held "
                "out: hold out 0 (validation.holdout in a recipe), and validate on a file of "
                "prompts (validation.prompts)"
            )

    def _take(self, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """The row to keep, cut where it must be and counted; None if it is not used."""
        mask = mask[: self.limits.max_length]
        used = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
        overlong = len(ids) > self.limits.max_length
        ids, mask = ids[:used], mask[:used]
        if reason := self._reason_against(ids, mask, overlong):
            self.counts[reason] += 1
            return None
        self.rows += 1
        self.cut += overlong
        self.tokens += used
        self.trained += int(mask.sum())
        return ids, mask

    def _reason_against(self, ids: np.ndarray, mask: np.ndarray, overlong: bool) -> str:
        """Why a row is not used; empty if it is."""
        limits = self.limits
        if overlong and limits.overlong == "drop":
            return f"longer than {limits.max_length} tokens"
        if not len(mask):
            within = f" in the first {limits.max_length}" if overlong else ""
            return f"no assistant token{within}"
        if mask.sum() < limits.min_trained or not trainable(mask):
            return "too few assistant tokens"
        digest = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        if digest in self.seen:
            return "duplicate"
        self.seen.add(digest)
        return ""

    def _why_nothing(self) -> str:
        info = self.info()
        if not info["read"]:
            return f"{info['origin']} holds no conversation; " + (
                "; ".join(info["warnings"]) or "give a source with conversations"
            )
        reasons = ", ".join(f"{count} {reason}" for reason, count in info["counts"].items())
        roles = ", ".join(info["roles"]) or "none"
        why = (
            f"no assistant token to train on in {info['origin']}: of {info['read']} rows: {reasons}"
        )
        if self.refusal:
            why += f" ({self.refusal})"
        return f"{why}; the roles seen are {roles}; look at it with `headsmith data inspect`"


def trainable(mask: np.ndarray) -> bool:
    """Whether a mask [T] leaves a row to train: two trained tokens in a row, not at the start.

    Row i of a head reads token i + 1 and predicts token i + 2; both must be the target's own.
    """
    return bool((mask[1:-1] & mask[2:]).any())


def _up_to_last(messages: list[Message], role: str) -> list[Message]:
    last = max(i for i, message in enumerate(messages) if message["role"] == role)
    return messages[: last + 1]


def _write_stream(path: Path, batches: Iterator[list[tuple[np.ndarray, np.ndarray]]]) -> None:
    import pyarrow as pa

    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))])
    with pa.ipc.new_stream(str(path), schema) as writer:
        for rows in filter(None, batches):
            lengths = [len(ids) for ids, _ in rows]
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
            arrays = [pa.ListArray.from_arrays(offsets, column) for column in columns]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
