"""Prompts to measure on: conversations from a JSONL file or a named task, tokenised turn by turn.

A row holds `prompt` (one turn), `turns` (answered one after the other) or `messages` (given as
they are, up to the last user message). FastChat rows (`question_id`, `category`, `turns`) fit.
`given`, a text or one a turn, is what the answer is expected to follow (`--drafter text`).
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.inference.records import Request

DEFAULT_TASK = "default"
HUB_TASKS: dict[str, tuple[str, str | None, str]] = {
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
}
_ID_KEYS = ("id", "question_id", "task_id", "prompt_id")

Message = dict[str, str]


@dataclass(slots=True, frozen=True)
class Conversation:
    """`context` is given; each of `turns` gets an answer, which may follow its text of `given`."""

    id: str
    task: str
    turns: tuple[str, ...]
    context: tuple[Message, ...] = ()
    given: tuple[str, ...] = ()


def prompts_sha256(conversations: Sequence[Conversation]) -> str:
    """A hash of the texts and their names, in their order: the same prompts have the same."""
    texts = [[one.task, one.id, one.turns, one.context] for one in conversations]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def load_prompts(
    source: str, *, data_dir: str | Path | None = None, limit: int | None = None
) -> list[Conversation]:
    """Conversations of `source`: files or task names separated by commas, each with `:N` for N.

    A name is a task (`default`, `mt_bench`, `humaneval`, `gsm8k`) or, with `data_dir`, any
    `NAME.jsonl` in that folder. `limit` bounds each source. Only a Hub task without `data_dir` uses
    the network. HeadsmithError names what cannot be read; EnvironmentFault when the Hub cannot.
    """
    if limit is not None and limit < 1:
        raise HeadsmithError(f"the limit of prompts is {limit}; it must be 1 or more")
    parts = [source] if Path(source).is_file() else source.split(",")
    conversations: list[Conversation] = []
    origins: dict[str, int] = {}
    for place, part in enumerate(part.strip() for part in parts):
        name, count = _split_count(part)
        bounds = [bound for bound in (count, limit) if bound is not None]
        for one in _load_one(name, data_dir)[: min(bounds, default=None)]:
            if origins.setdefault(one.task, place) != place:
                raise HeadsmithError(
                    f"two of the prompt sources {source} hold a task called {one.task}; "
                    "name each once, or rename one of the files"
                )
            conversations.append(one)
    return conversations


def read_jsonl(path: str | Path, task: str | None = None) -> list[Conversation]:
    """Conversations of a JSONL file; the task is the file's stem unless a row has `task`."""
    path = Path(path)
    try:
        # Not splitlines(): JSON strings may hold U+2028 and its like, which are not line ends here.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as fault:
        raise HeadsmithError(f"the prompts {path} cannot be read: {fault}") from fault
    rows: list[tuple[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append((f"{path}, line {number}", json.loads(line)))
            except json.JSONDecodeError as fault:
                raise HeadsmithError(
                    f"{path}, line {number} is not JSON ({fault.msg}); "
                    "a prompts file has one JSON object a line"
                ) from fault
    if not rows:
        raise HeadsmithError(f"the prompts {path} hold no row; write one JSON object a line")
    return _conversations(rows, task or path.stem)


class PromptTooLong(HeadsmithError):
    """A prompt that fills the target's context."""


@dataclass(slots=True)
class RequestBuilder:
    """Makes requests from conversations with the tokenizer's own chat template.

    `tokenizer` is a Hugging Face tokenizer, `max_context` the target's limit in tokens.
    `warnings` collects what a reader of the result should know.
    """

    tokenizer: Any
    max_context: int
    system_prompt: str | None = None
    warnings: list[str] = field(default_factory=list)

    def build(
        self, conversation: Conversation, turn: int = 0, answers: Sequence[str] = ()
    ) -> Request:
        """The request for `turn` (from 0), after `answers` to the turns before it.

        Raises PromptTooLong when the prompt leaves no room for a token in the context.
        """
        assert len(answers) >= turn, "a turn needs the answers to the turns before it"
        request_id = conversation.id
        if len(conversation.turns) > 1:
            request_id = f"{request_id}#{turn + 1}"
        ids = self._tokenise(self._messages(conversation, turn, answers), request_id)
        if len(ids) + 1 > self.max_context:
            raise PromptTooLong(
                f"prompt {request_id} of {conversation.task} is {len(ids)} tokens long and the "
                f"target's context holds {self.max_context}, its answer included; shorten it or "
                "leave it out"
            )
        expected = None
        if conversation.given:
            expected = self.tokenizer(conversation.given[turn], add_special_tokens=False)
            expected = list(expected["input_ids"])
        return Request(request_id, conversation.task, ids, turn, conversation.id, expected)

    def _messages(
        self, conversation: Conversation, turn: int, answers: Sequence[str]
    ) -> list[Message]:
        messages = [dict(message) for message in conversation.context]
        if self.system_prompt and not (messages and messages[0]["role"] == "system"):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        for text, answer in zip(conversation.turns[:turn], answers, strict=False):
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": conversation.turns[turn]})
        return messages

    def _tokenise(self, messages: list[Message], request_id: str) -> list[int]:
        if not self.tokenizer.chat_template:
            self._warn("the tokenizer has no chat template: prompts are the raw text of the turns")
            text = "\n".join(message["content"] for message in messages)
            return list(self.tokenizer(text)["input_ids"])
        # The template writes its own BOS; special tokens on top of it would give two.
        import jinja2

        try:
            text = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except jinja2.TemplateError as fault:
            raise HeadsmithError(
                f"the target's chat template refuses prompt {request_id}: {fault}"
            ) from fault
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def template_sha256(tokenizer: Any) -> str | None:
    """Hash of the chat template that made the prompts; None without one."""
    template = tokenizer.chat_template
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _split_count(part: str) -> tuple[str, int | None]:
    name, separator, count = part.rpartition(":")
    if not separator or not count.lstrip("-").isdigit() or Path(part).is_file():
        return part, None
    if int(count) < 1:
        raise HeadsmithError(f"{part} asks for {count} prompts; the number must be 1 or more")
    return name, int(count)


def _load_one(name: str, data_dir: str | Path | None) -> list[Conversation]:
    if Path(name).is_file():
        return read_jsonl(name)
    if data_dir is not None and (local := Path(data_dir) / f"{name}.jsonl").is_file():
        return read_jsonl(local)
    if name == DEFAULT_TASK:
        packaged = importlib.resources.files("headsmith.data") / "prompts" / "default.jsonl"
        with importlib.resources.as_file(packaged) as path:
            return read_jsonl(path)
    if data_dir is not None:
        raise HeadsmithError(f"there is no {name}.jsonl in {data_dir} and no file {name}")
    if name in HUB_TASKS:
        return _from_hub(name)
    raise HeadsmithError(
        f"the prompts {name!r} are neither a file nor a task; "
        f"tasks are {', '.join([DEFAULT_TASK, *HUB_TASKS])}"
    )


def _from_hub(name: str) -> list[Conversation]:
    repository, config, split = HUB_TASKS[name]
    try:
        import datasets

        rows = list(datasets.load_dataset(repository, config, split=split))
    except Exception as fault:  # the Hub client raises many kinds; all mean "not to be had"
        raise EnvironmentFault(
            f"the task {name} is read from the Hub ({repository}) and that failed "
            f"({type(fault).__name__}); give --data-dir DIR with {name}.jsonl in it"
        ) from fault
    if name == "humaneval":
        ask = "Complete the code I provided.\n\n"
        rows = [{"id": row["task_id"], "prompt": ask + row["prompt"]} for row in rows]
    elif name == "gsm8k":
        rows = [{"prompt": row["question"]} for row in rows]
    return _conversations(((f"{repository}, row {n}", row) for n, row in enumerate(rows)), name)


def _conversations(rows: Iterable[tuple[str, Any]], task: str) -> list[Conversation]:
    """Conversations of rows that come with the words that say where each of them is."""
    conversations: list[Conversation] = []
    taken: set[tuple[str, str]] = set()
    for number, (where, row) in enumerate(rows):
        if not isinstance(row, dict):
            raise HeadsmithError(f"{where} is a {type(row).__name__}, not a JSON object")
        context, turns = _turns(row, where)
        given = next((row[key] for key in _ID_KEYS if row.get(key) is not None), number)
        row_task, row_id = str(row.get("task") or task), str(given)
        if (row_task, row_id) in taken:
            row_id = f"{row_id}@{number}"
        taken.add((row_task, row_id))
        given_texts = _given(row, len(turns), where)
        conversations.append(Conversation(row_id, row_task, turns, context, given_texts))
    return conversations


def _turns(row: dict[str, Any], where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The given messages of a row and its user turns; every text must hold something."""
    context: tuple[Message, ...] = ()
    if row.get("turns") is not None:
        turns = row["turns"]
    elif row.get("messages") is not None:
        context, turns = _split_messages(row["messages"], where)
    elif row.get("prompt") is not None:
        turns = row["prompt"]
    else:
        raise HeadsmithError(f"{where} has none of `prompt`, `messages` and `turns`")
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns:
        raise HeadsmithError(f"{where} has no turn; `turns` is a list of texts")
    for text in turns:
        if not isinstance(text, str) or not text.strip():
            raise HeadsmithError(f"{where} has a turn that is empty or not a text")
    return context, tuple(turns)


def _given(row: dict[str, Any], turns: int, where: str) -> tuple[str, ...]:
    """The texts that the answers are expected to follow."""
    given = [] if row.get("given") is None else row["given"]
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or len(given) not in (0, turns):
        raise HeadsmithError(
            f"{where}: `given` is neither a text nor a list of {turns}, one a turn"
        )
    if not all(isinstance(text, str) for text in given):
        raise HeadsmithError(f"{where} has a `given` that is not a text")
    return tuple(given)


def _split_messages(messages: Any, where: str) -> tuple[tuple[Message, ...], list[str]]:
    try:
        plain = [{"role": str(m["role"]), "content": _text(m["content"])} for m in messages]
    except (KeyError, TypeError) as fault:
        raise HeadsmithError(
            f"{where} has a message that is not {{role, content}} with a text"
        ) from fault
    last = max((i for i, m in enumerate(plain) if m["role"] == "user"), default=-1)
    if last < 0:
        raise HeadsmithError(f"{where} has no message with the role `user`")
    return tuple(plain[:last]), [plain[last]["content"]]


def _text(content: Any) -> str:
    """A message's text; the list layout of the chat APIs is joined."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)
