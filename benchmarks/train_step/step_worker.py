"""A program that is measured step by step: a process that reads one JSON object a line and answers
with one (`serve`), and the side that asks (`Worker`). Needs nothing but Python and Linux, so that
it runs in any environment.
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

Answers = dict[str, Callable[[], dict[str, Any]]]


def memory(name: str) -> int:
    """A figure of /proc/self/status in bytes: VmRSS, resident now, or VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def serve(build: Callable[[dict[str, Any]], Answers]) -> None:
    """`build` makes the program from the settings in the first argument (JSON); its answers are
    `about` and `step`, and others that `Worker.ask` may name. What they print goes to stderr.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    try:
        answers = build(json.loads(sys.argv[1]))
        tell({"ready": answers["about"]()})
    except Exception as error:  # noqa: BLE001 - the other side says it to the user
        tell({"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error
    # The peak counts from here: model, data and optimiser are there, and no step has been made.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    for line in sys.stdin:
        asked = json.loads(line)["ask"]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            answer = answers[asked]()
        except Exception as error:  # noqa: BLE001
            tell({"error": f"{type(error).__name__}: {error}"})
            raise SystemExit(1) from error
        spent = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        spent["faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        tell(spent | {"growth": memory("VmHWM") - before} | answer)


class Failed(Exception):
    """A worker that cannot be measured, and why."""


class Worker:
    """A program in a process of its own. `Failed` when it does not start or breaks."""

    def __init__(
        self, name: str, python: str, script: Path, settings: dict[str, Any], threads: int
    ) -> None:
        self.name = name
        # A file and not a pipe, which nobody would empty.
        self._said = tempfile.TemporaryFile("w+")
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            self._process = subprocess.Popen(
                [python, str(script), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise Failed(f"{name}: {python} cannot be run: {error.strerror}") from None
        self.about = self._read()["ready"]

    def ask(self, what: str) -> dict[str, Any]:
        """The answer, with cpu and wall seconds, page faults and the bytes that it has grown."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"ask": what}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {}
        if not line or "error" in answer:
            self._said.seek(0)
            last = self._said.read().strip().splitlines()[-1:] or ["it ended without a word"]
            raise Failed(f"{self.name}: {answer.get('error', last[0])}")
        return answer
