"""Conversations to answer again, an answerer that needs no model, and a chat server that fails."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headsmith.data.chats import Chats
from headsmith.data.onpolicy.asking import Answer, Ask, Done
from headsmith.data.onpolicy.dialogues import Dialogue, dialogues

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "red green"},
    {"id": "b", "turns": ["one two", "three"]},
    {
        "id": "c",
        "conversations": [
            {"from": "system", "value": "be kind"},
            {"from": "human", "value": "tea?"},
            {"from": "gpt", "value": "an answer of somebody else"},
            {"from": "human", "value": "milk?"},
            {"from": "gpt", "value": "another"},
        ],
    },
    {"messages": [{"role": "user", "content": "blue"}]},
]


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Four conversations in four layouts, six answers in all."""
    path = tmp_path / "source.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.fixture
def chats(source: str) -> list[Dialogue]:
    return dialogues(Chats([source]))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def read() -> Callable[[Path], list[dict[str, Any]]]:
    """The rows of a JSON Lines file."""
    return read_lines


@dataclass
class Echo:
    """Says how many messages there were and what the last one said; `fate` has other answers, by
    the question. Stops the run, as a kill would, when `lives` answers are given.
    """

    fate: dict[str, Answer] = field(default_factory=dict)
    lives: int = 10**9
    asked: list[Ask] = field(default_factory=list)

    def answer(self, asks: Sequence[Ask], done: Done) -> None:
        for ask in asks:
            if not self.lives:
                raise KeyboardInterrupt
            self.lives -= 1
            self.asked.append(ask)
            question = ask.messages[-1]["content"]
            said = Answer("ok", f"{len(ask.messages)} {question}")
            done(ask, self.fate.get(question, said))


@pytest.fixture
def echo() -> type[Echo]:
    return Echo


# What a server does instead of answering: status, body and headers of a reply, or anything else.
Trick = tuple[int, Any, dict[str, str]] | Callable[[BaseHTTPRequestHandler], None]


def reply(handler: BaseHTTPRequestHandler, status: int, body: Any, headers: dict[str, str]) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@dataclass
class Server:
    """Echoes; `tricks` are played first, in order, on the requests whose last message they name."""

    url: str = ""
    tricks: dict[str, list[Trick]] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)
    busy: int = 0
    most_busy: int = 0
    pause_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tries(self) -> Counter[str]:
        """Requests by what they asked."""
        return Counter(body["messages"][-1]["content"] for body in self.bodies)

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers["Content-Length"])
        body = json.loads(handler.rfile.read(length))
        question = body["messages"][-1]["content"]
        with self.lock:
            self.bodies.append(body)
            self.headers.append(dict(handler.headers))
            self.times.setdefault(question, []).append(time.monotonic())
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
            waiting = self.tricks.get(question, [])
            trick = waiting.pop(0) if waiting else None
        time.sleep(self.pause_s)
        with self.lock:
            self.busy -= 1
        if callable(trick):
            trick(handler)
        elif trick is not None:
            reply(handler, *trick)
        elif handler.path != "/v1/chat/completions":
            reply(handler, 404, {"error": {"message": "no such page"}}, {})
        else:
            message = {"role": "assistant", "content": f"{len(body['messages'])} {question}"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply(handler, 200, {"choices": [choice]}, {})


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that runs in a thread; it echoes like `Echo`."""
    known = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            known.handle(self)

        def log_message(self, *rest: Any) -> None:
            return None

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    # Clients that go away in the middle are what is tested.
    http.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    known.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    yield known
    http.shutdown()
    thread.join()
    http.server_close()
