"""Chat completions on the wire: what is sent, and what a reply means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from headsmith.data.onpolicy.asking import Answer, Ask, Sampling, judged
from headsmith.data.onpolicy.thinking import Thinking
from headsmith.errors import HeadsmithError

_PASSING = (408, 409, 425, 429)
_TOO_LONG = ("context_length_exceeded", "context length", "context window", "too long")
_LONGEST_RETRY_AFTER_S = 600.0


class Later(Exception):
    """Why a request may go well if it is made again, `wait_s` from now if the server said so."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


def endpoint(url: str) -> str:
    """Where chat completions are asked for, of a server's address. Raises HeadsmithError."""
    address = url.rstrip("/")
    scheme, separator, rest = address.partition("://")
    if scheme not in ("http", "https") or not separator or not rest or any(map(str.isspace, rest)):
        raise HeadsmithError(
            f"the server's address {url!r} is not http or https; give for example "
            "http://localhost:8000/v1"
        )
    if address.endswith("/chat/completions"):
        return address
    # A bare host and port: where all servers have it.
    address = address if "/" in rest else f"{address}/v1"
    return f"{address}/chat/completions"


def body_of(
    ask: Ask, model: str, sampling: Sampling, template_args: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON object that asks for an answer; what was not chosen is not in it."""
    body: dict[str, Any] = {
        "model": model,
        "messages": ask.messages,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
    }
    if sampling.temperature:
        body["seed"] = sampling.seed_of(ask)
    for name, value in (("top_p", sampling.top_p), ("top_k", sampling.top_k)):
        if value is not None:
            body[name] = value
    if template_args:
        body["chat_template_kwargs"] = dict(template_args)
    return body


def read_reply(status: int, content: bytes, wait_s: float | None, thinking: Thinking) -> Answer:
    """What a reply means. Raises Later for what may pass."""
    if status in _PASSING or status >= 500:
        raise Later(f"status {status}{_said(content)}", wait_s)
    if status != 200:
        said = f"status {status}{_said(content)}"
        too_long = any(sign in said.lower() for sign in _TOO_LONG)
        return Answer("too_long" if too_long else "error", detail=said)
    try:
        choice = json.loads(content)["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        text, refusal = message.get("content"), message.get("refusal")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Later(f"a reply that is no chat completion ({error!r})") from error
    if refusal or reason == "content_filter":
        return Answer("refused", detail=_short(str(refusal or "content filter")))
    if reason not in ("stop", "length", "eos", None):
        # Neither a call of tools nor a fault inside the server is an answer.
        return Answer("error", detail=f"finish_reason is {reason!r}")
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(text or "", str) or not isinstance(thought, str):
        raise Later("a reply whose content is not text")
    cut = reason == "length"
    if not (text or "").strip():
        return Answer("thinking" if thought and cut else "empty")
    # Valid JSON may hold half of a surrogate pair, which no file can.
    whole = thinking.joined(thought, text).encode("utf-8", "replace").decode()
    return judged(whole, "", cut, thinking)


def wait_of(headers: Mapping[str, str]) -> float | None:
    """Seconds that Retry-After asks for, whether as a number or as a date; None without."""
    given = headers.get("retry-after")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        try:
            when = parsedate_to_datetime(given)
        except (TypeError, ValueError):
            return None
        when = when if when.tzinfo else when.replace(tzinfo=timezone.utc)
        seconds = (when - datetime.now(timezone.utc)).total_seconds()
    if seconds != seconds:
        return None
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER_S)


def _said(content: bytes) -> str:
    """What a reply says of its fault, for a person."""
    text = content.decode("utf-8", "replace").strip()
    try:
        fault = json.loads(text)
        fault = fault.get("error", fault)
        text = str(fault.get("message", fault) if isinstance(fault, dict) else fault)
    except (ValueError, AttributeError):
        pass
    return f": {_short(text)}" if text else ""


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:197]}..."
