"""Chat completions from a server in a thread, which fails in every way that servers do."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headsmith.data.onpolicy.asking import Answer, Ask, Sampling
from headsmith.data.onpolicy.chat_server import ServerAnswerer
from headsmith.data.onpolicy.dialogues import Dialogue
from headsmith.data.onpolicy.reply import endpoint, wait_of
from headsmith.data.onpolicy.run import regenerate
from headsmith.data.onpolicy.thinking import Thinking
from headsmith.errors import EnvironmentFault, HeadsmithError

Server = Any  # the one of conftest.py
Trick = tuple[int, Any, dict[str, str]] | Callable[[BaseHTTPRequestHandler], None]


def answerer(server: Server, thinking: Thinking | None = None, **more: Any) -> ServerAnswerer:
    sampling = more.pop("sampling", Sampling(max_new_tokens=9))
    options = {"pause_s": 0.01, "retries": 2, "timeout_s": 5.0, "concurrency": 2, **more}
    return ServerAnswerer(server.url, "m", sampling, thinking or Thinking(), **options)


def ask(server: Server, question: str = "q", *tricks: Trick, **more: Any) -> Answer:
    """What becomes of one question, if the server plays these tricks before it answers."""
    server.tricks[question] = list(tricks)
    found: list[Answer] = []
    asked = Ask("k", 0, [{"role": "user", "content": question}])
    answerer(server, **more).answer([asked], lambda _, answer: found.append(answer))
    (answer,) = found
    return answer


def status(code: int, body: Any = b"", **headers: str) -> Trick:
    return code, body, {name.replace("_", "-"): value for name, value in headers.items()}


def says(text: Any, reason: Any = "stop", **more: Any) -> Trick:
    message = {"role": "assistant", "content": text, **more}
    return status(200, {"choices": [{"index": 0, "message": message, "finish_reason": reason}]})


def cut_connection(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"message": {"content": "half of an ans')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def no_reply(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


PASSING: dict[str, Trick] = {
    "500": status(500, b"Internal Server Error"),
    "503": status(503, {"error": {"message": "loading the model"}}),
    "429": status(429, {"error": "slow down"}),
    "408": status(408),
    "cut connection": cut_connection,
    "no reply": no_reply,
    "garbage": status(200, b"<html>not what you wanted</html>"),
    "half JSON": status(200, b'{"choices": [{"message": {"content": "half of an ans'),
    "another object": status(200, {"object": "list"}),
    "no choice": status(200, {"choices": []}),
    "no message": status(200, {"choices": [{"index": 0}]}),
    "message null": status(200, {"choices": [{"message": None}]}),
    "a list": status(200, [1]),
    "content a number": says(7),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_may_pass_is_tried_again(server: Server, fault: str) -> None:
    assert ask(server, "q", PASSING[fault], PASSING[fault]) == Answer("ok", "1 q")
    assert server.tries() == {"q": 3}


@pytest.mark.parametrize("fault", PASSING)
def test_what_does_not_pass_is_an_error_and_no_text(server: Server, fault: str) -> None:
    answer = ask(server, "q", *[PASSING[fault]] * 9)
    assert answer.status == "error" and answer.text == ""
    assert answer.detail.startswith("tried 3 times, then: ") and len(answer.detail) > 30
    assert server.tries() == {"q": 3}


def test_retry_after_is_heeded(server: Server) -> None:
    slow = status(429, b"", Retry_After="0.4")
    assert ask(server, "q", slow).status == "ok"
    first, second = server.times["q"]
    assert 0.35 < second - first < 3
    # Without it the pauses double.
    began = time.monotonic()
    ask(server, "r", *[status(500)] * 2, pause_s=0.1)
    assert time.monotonic() - began > 0.75 * (0.1 + 0.2)


def test_retry_after_may_be_a_date() -> None:
    assert wait_of({}) is None and wait_of({"retry-after": "soon"}) is None
    assert wait_of({"retry-after": "7"}) == 7 and wait_of({"retry-after": "-1"}) == 0
    assert wait_of({"retry-after": "nan"}) is None
    assert wait_of({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert wait_of({"retry-after": "Wed, 21 Oct 2115 07:28:00 GMT"}) == 600


def test_a_server_that_hangs_is_tried_again(server: Server) -> None:
    def hang(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(4)

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)

    for trick in (hang, drip):
        began = time.monotonic()
        answer = ask(server, "q", trick, retries=0, timeout_s=1.0)
        assert answer == Answer("error", detail="tried once, then: no answer within 1 s")
        assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("trick", "answer"),
    [
        (says("cut o", "length"), Answer("length", "cut o")),
        (says(None), Answer("empty")),
        (says(" \n"), Answer("empty")),
        (says(None, refusal="I can't."), Answer("refused", detail="I can't.")),
        (says("half", "content_filter"), Answer("refused", detail="content filter")),
        (says(None, "tool_calls"), Answer("error", detail="finish_reason is 'tool_calls'")),
        (says("\ud83d"), Answer("ok", "?")),
        (says("x", None), Answer("ok", "x")),
        (says(None, "length", reasoning_content="hm"), Answer("thinking")),
        (says("4", reasoning="2+2"), Answer("ok", "<think>\n2+2\n</think>\n\n4")),
        (says("<think>2+", "length"), Answer("thinking", detail="the thinking has no end")),
        (
            status(400, {"error": {"code": "x", "message": "maximum context length is 9"}}),
            Answer("too_long", detail="status 400: maximum context length is 9"),
        ),
        (status(422, {"detail": "no"}), Answer("error", detail="status 422: {'detail': 'no'}")),
    ],
)
def test_what_a_reply_means(server: Server, trick: Trick, answer: Answer) -> None:
    assert ask(server, "q", trick) == answer
    assert server.tries() == {"q": 1}


def test_thinking_is_dropped_on_request(server: Server) -> None:
    for trick in (
        says("4", reasoning_content="2+2"),
        says("<think>2+2</think>4"),
        says("2+2</think>\n\n4"),
    ):
        assert ask(server, "q", trick, thinking=Thinking(False)) == Answer("ok", "4")


def test_the_request(server: Server) -> None:
    ask(server, "q", api_key="secret", template_args={"enable_thinking": False})
    (body,), (headers,) = server.bodies, server.headers
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "q"}],
        "max_tokens": 9,
        "temperature": 0.0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    sampling = Sampling(9, temperature=0.7, top_p=0.9, top_k=20, seed=5)
    for _ in range(2):
        ask(server, "q", sampling=sampling)
    ask(server, "q", sampling=Sampling(9, temperature=0.7, seed=6))
    drawn = server.bodies[1]
    assert (drawn["temperature"], drawn["top_p"], drawn["top_k"]) == (0.7, 0.9, 20)
    assert drawn == server.bodies[2] and drawn["seed"] != server.bodies[3]["seed"]
    assert 0 <= drawn["seed"] < 2**31 and "Authorization" not in server.headers[1]


def test_faults_of_every_request_end_the_run_at_once(server: Server) -> None:
    with pytest.raises(HeadsmithError, match="refuses the API key .*no key: set the variable"):
        ask(server, "q", status(401))
    with pytest.raises(HeadsmithError, match="forbids it .*sent the given key"):
        ask(server, "q", status(403), api_key="k")
    with pytest.raises(HeadsmithError, match="404: it has no model m, or"):
        ask(server, "q", status(404))
    assert server.tries() == {"q": 3}


def test_a_server_that_is_gone_ends_the_run_and_keeps_what_is_there(
    server: Server, chats: list[Dialogue], tmp_path: Path, read: Any
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = SimpleNamespace(url=f"http://127.0.0.1:{free.getsockname()[1]}/v1")
    out = tmp_path / "out.jsonl"
    # One that never answered has the wrong address, and one conversation is enough to say so.
    with pytest.raises(EnvironmentFault, match="cannot be reached .*; see that the server runs"):
        regenerate(chats, lambda: answerer(nobody, retries=9), out, {})
    many = [Dialogue(str(i), str(i), chats[0].parts) for i in range(20)]
    found = answerer(nobody, retries=0)
    with pytest.raises(EnvironmentFault, match="8 requests in a row failed .*the same command"):
        regenerate(many, lambda: found, out, {})
    assert not out.exists()
    assert regenerate(many, lambda: answerer(server), out, {}).answered == 20


def test_concurrency_is_what_was_asked_for(server: Server, chats: list[Dialogue]) -> None:
    server.pause_s = 0.05
    asks = [Ask(str(i), 0, [{"role": "user", "content": str(i)}]) for i in range(12)]
    found: dict[str, Answer] = {}
    answerer(server, concurrency=4).answer(asks, lambda one, said: found.update({one.key: said}))
    assert found == {str(i): Answer("ok", f"1 {i}") for i in range(12)}
    assert server.most_busy == 4


def test_whole_conversations_through_faults(
    server: Server, chats: list[Dialogue], tmp_path: Path, read: Any, echo: Any
) -> None:
    server.tricks = {
        "red green": [status(500), cut_connection],
        "three": [status(429, b"", Retry_After="0")],
        "tea?": [PASSING["garbage"]],
        "blue": [says(None, refusal="no")],
    }
    out, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    result = regenerate(chats, lambda: answerer(server), out, {})
    assert result.answered == 3 and result.left_out == {"refused": 1}
    regenerate(chats, echo, other, {})
    assert read(out) == read(other)[:3]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://h:8000", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1/", "http://h:8000/v1/chat/completions"),
        ("https://h/api/v3", "https://h/api/v3/chat/completions"),
        ("https://h/v1/chat/completions", "https://h/v1/chat/completions"),
    ],
)
def test_addresses(given: str, used: str) -> None:
    assert endpoint(given) == used


@pytest.mark.parametrize("given", ["localhost:8000", "ftp://h/v1", "http://", "http://a b/v1", ""])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(HeadsmithError, match="give for example http://localhost:8000/v1"):
        endpoint(given)


@pytest.mark.parametrize("option", ["concurrency", "retries", "timeout_s"])
def test_numbers_that_cannot_be(server: Server, option: str) -> None:
    with pytest.raises(HeadsmithError, match=f"{option.removesuffix('_s')} is -1; it must be"):
        answerer(server, **{option: -1})
