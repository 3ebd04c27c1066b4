"""Answers of any server that speaks OpenAI's chat completions, many at a time.

What may pass is tried again, later and later: no connection, a time-out, a cut or unreadable
reply, status 408, 409, 425, 429 and 5xx. A reply that tells how long to wait (Retry-After) is
heeded. What does not pass is told at once: 401, 403 and 404 end the run, and so does a server that
fails one request after the other; any other refusal is that conversation's own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headsmith.data.onpolicy.asking import Answer, Ask, Done, Sampling
from headsmith.data.onpolicy.reply import Later, body_of, endpoint, read_reply, wait_of
from headsmith.data.onpolicy.thinking import Thinking
from headsmith.errors import EnvironmentFault, HeadsmithError

# huggingface_hub brings one or the other, by its version; for us they are the same.
try:
    import httpx2 as httpx
except ModuleNotFoundError:
    import httpx  # type: ignore[no-redef,import-not-found,unused-ignore]

_LONGEST_WAIT_S = 60.0
# Tries to connect before a server that never answered is taken to be somewhere else.
_TRIES_TO_REACH = 3


@dataclass(slots=True)
class ServerAnswerer:
    """Answers of `model` on the server at `url` (that of `/v1`), `concurrency` at a time.

    Each request is tried 1 + `retries` times, the first pause `pause_s` long and each later one
    twice the one before, and may take `timeout_s`. `template_args` goes along as
    chat_template_kwargs.
    """

    url: str
    model: str
    sampling: Sampling
    thinking: Thinking
    concurrency: int = 16
    retries: int = 6
    timeout_s: float = 600.0
    api_key: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    pause_s: float = 1.0
    _failed_in_a_row: int = field(default=0, init=False, repr=False)
    _reached: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self.url = endpoint(self.url)
        for name, value, least in (
            ("concurrency", self.concurrency, 1),
            ("retries", self.retries, 0),
            ("timeout", self.timeout_s, 1),
        ):
            if value < least:
                raise HeadsmithError(f"{name} is {value}; it must be {least} or more")

    def answer(self, asks: Sequence[Ask], done: Done) -> None:
        """See `Answerer`."""
        asyncio.run(self._answer_all(asks, done))

    async def _answer_all(self, asks: Sequence[Ask], done: Done) -> None:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        # A read may take as long as the whole answer, a connection may not.
        timeout = httpx.Timeout(self.timeout_s, connect=min(self.timeout_s, 30.0))
        limits = httpx.Limits(max_connections=self.concurrency)
        async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits) as client:
            waiting = iter(asks)

            async def work() -> None:
                for ask in waiting:
                    answer = await self._answer(client, ask)
                    self._watch(answer)
                    done(ask, answer)

            workers = [asyncio.create_task(work()) for _ in range(min(self.concurrency, len(asks)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    def _watch(self, answer: Answer) -> None:
        """A server that is gone must not cost every conversation its tries."""
        self._failed_in_a_row = self._failed_in_a_row + 1 if answer.status == "error" else 0
        if self._failed_in_a_row >= max(8, 2 * self.concurrency):
            raise EnvironmentFault(
                f"{self._failed_in_a_row} requests in a row failed at {self.url} (the last: "
                f"{answer.detail}); see to the server, then the same command goes on"
            )

    async def _answer(self, client: Any, ask: Ask) -> Answer:
        for attempt in range(self.retries + 1):
            try:
                return await self._try(client, ask)
            except Later as reason:
                said = str(reason)
                unreached = isinstance(reason.__cause__, httpx.ConnectError) and not self._reached
                if unreached and attempt + 1 == _TRIES_TO_REACH:
                    raise EnvironmentFault(
                        f"{self.url} cannot be reached ({said.rstrip('.')}); see that the server "
                        "runs there, then the same command goes on"
                    ) from reason
                if attempt == self.retries:
                    break
                pause = self.pause_s * 2**attempt * random.uniform(0.75, 1.25)
                pause = min(pause, _LONGEST_WAIT_S) if reason.wait_s is None else reason.wait_s
                await asyncio.sleep(pause)
        tries = "once" if not self.retries else f"{self.retries + 1} times"
        return Answer("error", detail=f"tried {tries}, then: {said}")

    async def _try(self, client: Any, ask: Ask) -> Answer:
        body = body_of(ask, self.model, self.sampling, self.template_args)
        try:
            # The client's own limit counts from one piece to the next; this one counts all of it.
            reply = await asyncio.wait_for(client.post(self.url, json=body), self.timeout_s)
        except (httpx.TimeoutException, asyncio.TimeoutError) as error:
            raise Later(f"no answer within {self.timeout_s:g} s") from error
        except httpx.InvalidURL as error:
            raise HeadsmithError(
                f"the server's address {self.url} cannot be one: {error}"
            ) from error
        except httpx.UnsupportedProtocol as error:
            raise HeadsmithError(f"the server's address {self.url} is not http or https") from error
        except httpx.HTTPError as error:
            raise Later(str(error) or type(error).__name__) from error
        self._reached = True
        self._refuse(reply)
        return read_reply(reply.status_code, reply.content, wait_of(reply.headers), self.thinking)

    def _refuse(self, reply: Any) -> None:
        """The faults that every other request would meet too."""
        what = {401: "refuses the API key", 403: "forbids it"}.get(reply.status_code)
        if what is not None:
            key = "the given key" if self.api_key else "no key: set the variable of --api-key-env"
            raise HeadsmithError(f"{self.url} {what} (status {reply.status_code}; sent {key})")
        if reply.status_code == 404:
            raise HeadsmithError(
                f"{self.url} answers 404: it has no model {self.model}, or chat completions lie "
                "elsewhere; give the address that ends in /v1 as --server"
            )
