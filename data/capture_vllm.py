"""States of the target as vLLM computes them: a process of vLLM's own Python beside this one.

vLLM gives the residual stream behind any block; the final norm, the teacher's first choice and its
normaliser are made here, with the target's own norm and output head.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from headsmith.data.pack import Row
from headsmith.data.states import States, read_tokens, teacher_of
from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.models import loading
from headsmith.models.target import Target

WORKER = Path(__file__).with_name("vllm_worker.py")


@dataclass
class VllmStates:
    """States of packed rows, as vLLM computes them. layers: ascending, the taps and the last one.
    `ask` gives for every list of token ids the file with its states.
    """

    target: Target
    taps: tuple[int, ...]
    layers: list[int]
    ask: Callable[[list[list[int]]], list[Path]]

    def states(self, row: Row) -> States:
        """Of a packed row, every document of which is a request of its own to vLLM."""
        documents = row.ids.split(row.lengths)
        files = self.ask([ids.tolist() for ids in documents])
        pairs = zip(documents, files, strict=True)
        return self._as_states(row, torch.cat([self._take(ids, file) for ids, file in pairs]))

    def _take(self, ids: Tensor, file: Path) -> Tensor:
        """The states [T, layers, H] in a file of vLLM, which is then removed."""
        tensors = load_file(file)
        file.unlink()
        if not torch.equal(tensors["token_ids"], ids):
            raise HeadsmithError("vLLM gave the states of other tokens than it was asked for")
        states = tensors["hidden_states"]
        if tuple(states.shape[1:]) != (len(self.layers), self.target.hidden_size):
            raise HeadsmithError(
                f"vLLM keeps {states.shape[1]} states of width {states.shape[2]} a token, and "
                f"{len(self.layers)} of width {self.target.hidden_size} are needed: "
                f"eagle_aux_hidden_state_layer_ids {self.layers} of {self.target.path}"
            )
        return states

    @torch.no_grad()
    def _as_states(self, row: Row, stream: Tensor) -> States:
        """stream [T, layers, H] before the blocks."""
        target = self.target
        stream = stream.to(target.dtype)
        taps = stream[:, [self.layers.index(tap) for tap in self.taps]]
        behind = stream[read_tokens(row), self.layers.index(target.num_layers)]
        last = target.final_norm(behind.to(target.device))
        return States(taps.to(target.device), last, *teacher_of(target, last))


def layers_of(target: Target, taps: tuple[int, ...]) -> list[int]:
    """What vLLM must keep for these taps."""
    return sorted({*taps, target.num_layers})


@contextmanager
def vllm_states(
    target: Target, taps: tuple[int, ...], longest: int, python: str, devices: int
) -> Iterator[VllmStates]:
    """A worker under the interpreter `python` for documents of up to `longest` tokens, ready, on
    so many devices. Of the target only the ends are needed.

    Raises EnvironmentFault when it does not start, HeadsmithError for a target that vLLM cannot
    load from where it is.
    """
    place, extra = loading.locate(target.path)
    if extra:
        raise HeadsmithError(
            f"the vllm backend cannot read {target.path}, a GGUF file; give the model's folder"
        )
    layers = layers_of(target, taps)
    with tempfile.TemporaryDirectory(prefix="headsmith-vllm-") as name:
        folder = Path(name)
        # Its folder is the first on its path: ours holds modules whose names are not vLLM's.
        shutil.copy(WORKER, folder)
        with open(folder / "log", "w") as log:
            process, answers = _start(python, folder, log)
        worker = _Worker(process, answers, folder / "log")
        try:
            worker.ask(
                {
                    "target": place,
                    "revision": target.revision,
                    "dtype": str(target.dtype).removeprefix("torch."),
                    # One token more is generated.
                    "longest": min(longest + 1, target.max_context),
                    "devices": devices,
                    "layers": layers,
                    "folder": str(folder / "states"),
                }
            )
            yield VllmStates(target, taps, layers, worker.files)
        finally:
            process.kill()
            process.wait()
            answers.close()


@dataclass
class _Worker:
    """The other process: a line of JSON for a line of JSON."""

    process: subprocess.Popen[str]
    answers: IO[str]
    log: Path

    def files(self, prompts: list[list[int]]) -> list[Path]:
        return [Path(name) for name in self.ask(prompts)]

    def ask(self, question: Any) -> Any:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        line = self.answers.readline()
        if not line:
            code = self.process.wait()
            raise EnvironmentFault(
                f"vLLM ended with code {code} while it computed states: {_last_words(self.log)}"
            )
        return json.loads(line)


def _start(python: str, folder: Path, log: IO[str]) -> tuple[subprocess.Popen[str], IO[str]]:
    ours, theirs = os.pipe()
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # In this process, so that the engine can be stepped until states are written.
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(folder)}
    command: Sequence[str] = [python, str(folder / WORKER.name), str(theirs)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            pass_fds=[theirs],
            env={**defaults, **os.environ, **fixed},
        )
    except OSError as error:
        os.close(ours)
        raise EnvironmentFault(
            f"--vllm-python {python} does not start ({error.strerror}); give the Python of an "
            "environment with vLLM"
        ) from error
    finally:
        os.close(theirs)
    return process, os.fdopen(ours)


def _last_words(log: Path) -> str:
    """The last line of an exception in what vLLM printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    faults = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    said = (faults or [line for line in lines if line] or ["it said nothing"])[-1]
    return said if len(said) <= 300 else f"{said[:297]}..."
