"""What the processes of a run know of each other: who goes first, who is still there, for how long
anybody waits.

What only the first process does (tokenising, writing checkpoints) and what each does for as long
as it takes (validation, waiting for features) is waited for outside of collectives, by looking into
a store, without a limit: as long as every process shows that it lives. Collectives have a limit of
their own (`LIMIT`) and only ever wait for the others to finish the same step.

A process that is gone, whatever killed it, ends the others within a minute and with one sentence.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count

import torch.distributed as dist

from headsmith.errors import EnvironmentFault, HeadsmithError

# Of a collective; none of them waits for more than the others' share of one step.
LIMIT = timedelta(minutes=10)
SECONDS_BETWEEN_BEATS = 2.0
# Without a sign of life for so long (`$HEADSMITH_SILENCE`) a process is taken for gone.
SECONDS_OF_SILENCE = 40.0
SECONDS_BETWEEN_LOOKS = 0.05
# How long a process that ends waits for the word of another that ended before it.
SECONDS_FOR_LAST_WORDS = 3.0
_ANSWER = timedelta(seconds=20)
_GOES_ON = "the same command continues from the last checkpoint"


class Ranks:
    """The processes of this launch, of which this one is number `index`; alone, nothing waits.

    Made by all of them together, after the process group (`together`).
    """

    def __init__(self) -> None:
        self.index, self.count = 0, 1
        self._turns = count()
        if dist.is_available() and dist.is_initialized():
            self.index, self.count = dist.get_rank(), dist.get_world_size()
        self._watch: _Watch | None = None
        if self.count > 1:
            self._store, address = self._open()
            self._watch = _Watch(self.index, self.count, *address)

    @property
    def first(self) -> bool:
        return self.index == 0

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """The first process runs the block, then all the others."""
        name = f"turn/{next(self._turns)}"
        if not self.first:
            self._await([name])
        yield
        if self.first:
            self._say(name)

    def wait_for_first(self) -> None:
        """Go on once the first process has come here."""
        with self.first_goes_first():
            pass

    def meet(self) -> None:
        """Go on once all have come here, however long it takes."""
        turn = next(self._turns)
        self._say(f"turn/{turn}/{self.index}")
        self._await([f"turn/{turn}/{other}" for other in range(self.count)])

    def close(self) -> None:
        """This process no longer looks at the others, nor they at it."""
        self._close(None)

    def fail(self, error: BaseException) -> BaseException:
        """This process ends by `error`. Returns what to raise: `error`, or a sentence if that only
        says that another process is gone.
        """
        told = error
        if self._watch is not None and _is_of_connection(error):
            told = EnvironmentFault(self._last_words(self._watch))
        self._close(told)
        return told

    def _close(self, told: BaseException | None) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.stop()
        with suppress(EnvironmentFault):
            self._say(f"end/{self.index}", "" if told is None else _one_line(told))
            if self.first:
                # The store goes with this process, so the others must have read it.
                soon = 2 * SECONDS_BETWEEN_BEATS + SECONDS_FOR_LAST_WORDS
                limit = 60 if told is None else soon
                self._await([f"end/{other}" for other in range(self.count)], limit)

    def _open(self) -> tuple[dist.TCPStore, tuple[str, int]]:
        """A store of our own, in the first process, and where it is."""
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        store = None
        if self.first:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_ANSWER)
        port = [store.port if store is not None else 0]
        dist.broadcast_object_list(port, src=0)
        return store or _client(host, port[0]), (host, port[0])

    def _say(self, name: str, words: str = "") -> None:
        if self.count == 1:
            return
        try:
            self._store.set(name, words)
        except RuntimeError as error:
            raise EnvironmentFault(_gone(0)) from error

    def _await(self, names: list[str], limit: float | None = None) -> None:
        """Wait until all names were said; EnvironmentFault when another process is gone."""
        if self.count == 1:
            return
        began = time.monotonic()
        while not self._are_said(names):
            if self._watch is not None and self._watch.lost is not None:
                raise EnvironmentFault(self._watch.lost)
            if limit is not None and time.monotonic() - began > limit:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _are_said(self, names: list[str]) -> bool:
        try:
            return self._store.check(names)
        except RuntimeError as error:
            raise EnvironmentFault(_gone(0)) from error

    def _last_words(self, watch: _Watch) -> str:
        """Who ended first, by its own word or because its connection broke."""
        began = time.monotonic()
        while time.monotonic() - began < SECONDS_FOR_LAST_WORDS:
            if watch.lost is not None:
                return watch.lost
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return (
            "another process of this run is gone, or its connection; what it said last is the "
            f"reason; {_GOES_ON}"
        )


@contextmanager
def together() -> Iterator[Ranks]:
    """The processes of this launch, within a block that all of them enter; what ends one of them in
    it ends the others, with a sentence that says so.
    """
    ranks = Ranks()
    try:
        yield ranks
    except BaseException as error:
        told = ranks.fail(error)
        if told is error:
            raise
        raise told from error
    ranks.close()


class _Watch(threading.Thread):
    """Shows that this process lives, and looks whether the others do; ends this one if not.

    A thread, because a process that waits in a collective for one that is gone cannot look.
    """

    def __init__(self, index: int, world: int, host: str, port: int) -> None:
        super().__init__(daemon=True, name="headsmith-watch")
        self.index, self.others = index, [other for other in range(world) if other != index]
        # Its own connection: another thread may be waiting on the main one.
        self.store = _client(host, port)
        self.lost: str | None = None
        # Looks and not seconds, so that a machine that slept does not accuse all the others.
        self._looks = max(2, round(_silence() / SECONDS_BETWEEN_BEATS))
        self._silent = dict.fromkeys(self.others, 0)
        self._beats: dict[int, bytes] = {}
        self._stopped = threading.Event()
        self._beat = count(1)
        self.start()

    def stop(self) -> None:
        """No longer end this process, whatever becomes of the others."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        while not self._stopped.is_set():
            self.lost = self._look()
            if self.lost is not None:
                self._end(self.lost)
                return
            self._stopped.wait(SECONDS_BETWEEN_BEATS)

    def _look(self) -> str | None:
        """Beat and look; what to say if another process is gone."""
        try:
            self.store.set(f"beat/{self.index}", str(next(self._beat)))
            for other in self.others:
                if self.store.check([f"end/{other}"]):
                    words = self.store.get(f"end/{other}").decode()
                    if words:
                        return f"process {other} of this run ended: {words}"
                    self._silent[other] = 0
                    continue
                name = f"beat/{other}"
                beat = self.store.get(name) if self.store.check([name]) else b""
                same = beat == self._beats.get(other)
                self._silent[other] = self._silent[other] + 1 if same else 0
                self._beats[other] = beat
                if self._silent[other] >= self._looks:
                    return _gone(other)
        except RuntimeError:
            return _gone(0)
        return None

    def _end(self, words: str) -> None:
        """End this process, unless it comes to the same by itself in a moment."""
        if self._stopped.wait(SECONDS_FOR_LAST_WORDS):
            return
        with suppress(RuntimeError):
            self.store.set(f"end/{self.index}", words)
        print(f"headsmith: error: {words}", file=sys.stderr, flush=True)
        os._exit(EnvironmentFault.exit_code)


def _silence() -> float:
    given = os.environ.get("HEADSMITH_SILENCE", str(SECONDS_OF_SILENCE))
    try:
        return float(given)
    except ValueError:
        raise HeadsmithError(f"HEADSMITH_SILENCE is {given!r}; give a number of seconds") from None


def _client(host: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_ANSWER)


def _gone(other: int) -> str:
    return (
        f"process {other} of this run gives no sign of life any more: it was killed, or its "
        f"machine or network is gone; {_GOES_ON}"
    )


def _is_of_connection(error: BaseException) -> bool:
    """Whether an exception says that a collective lost a partner, which is never its own fault."""
    if isinstance(error, dist.DistError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and ("gloo" in said or "connection" in said)


def _one_line(error: BaseException) -> str:
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "it was stopped"
    return " ".join(str(error).split())[:500] or type(error).__name__
