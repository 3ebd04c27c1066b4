"""A program that is measured step by step: a process that reads one JSON object a line and answers
with one (`serve`), and the side that asks (`Worker`). Needs nothing but Python on Linux, so that it
runs in any environment.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answers = dict[str, Callable[[], Any]]


def memory(name: str) -> int:
    """A figure of /proc/self/status in bytes: VmRSS, resident now, or VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def reset_peak() -> Callable[[], int]:
    """Returns what tells the bytes that this process has grown by at its peak since now."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    return lambda: memory("VmHWM") - before


def serve(about: dict[str, Any], build: Callable[[dict[str, Any]], Answers]) -> None:
    """Answer until nobody asks any more. `begin` with settings makes the program (`build`) in a
    process forked from this one, which has imported everything; `end` ends it. What it can be asked
    meanwhile are its `step` and what else `build` returns. What it prints goes to stderr.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    tell(about)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            try:
                _answer(json.loads(line)["settings"], build, tell)
            except Exception as error:  # noqa: BLE001 - the other side says it to the user
                tell({"error": f"{type(error).__name__}: {error}"})
            os._exit(0)
        os.waitpid(child, 0)


def _answer(
    settings: dict[str, Any],
    build: Callable[[dict[str, Any]], Answers],
    tell: Callable[[dict[str, Any]], None],
) -> None:
    answers = build(settings)
    # The peak counts from here: model, data and optimiser are there, and no step has been made.
    grown = reset_peak()
    tell({"settings": answers["settings"]()})
    while line := sys.stdin.readline():
        asked = json.loads(line)["ask"]
        if asked == "end":
            tell({})
            return
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        wall, cpu = time.perf_counter(), time.process_time()
        answer = answers[asked]()
        spent = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        spent["faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        tell(spent | {"growth": grown()} | answer)


class Failed(Exception):
    """A worker that cannot be measured, and why."""


class Worker:
    """A program in a process of its own. `Failed` when it does not start or breaks."""

    def __init__(self, name: str, python: str, script: Path, threads: int) -> None:
        self.name = name
        # A file and not a pipe, which nobody would empty.
        self._said = tempfile.TemporaryFile("w+")
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
        }
        try:
            self._process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise Failed(f"{name}: {python} cannot be run: {error.strerror}") from None
        self.about = self._read()

    def begin(self, settings: dict[str, Any]) -> str:
        """Make the program; returns what it says of its settings."""
        return self._send({"settings": settings})["settings"]

    def ask(self, what: str) -> dict[str, Any]:
        """The answer, with cpu and wall seconds, page faults and the bytes that it has grown."""
        return self._send({"ask": what})

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _send(self, line: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {}
        if not line or "error" in answer:
            self._said.seek(0)
            last = self._said.read().strip().splitlines()[-1:] or ["it ended without a word"]
            raise Failed(f"{self.name}: {answer.get('error', last[0])}")
        return answer
