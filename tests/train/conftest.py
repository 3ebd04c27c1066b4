"""Conversations to train a head on, a recipe that does, and processes that can be killed."""

import json
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORDS = "one two three red green blue tea milk sun moon sea hill".split()


def write_conversations(path: Path, count: int, seed: int = 0) -> Path:
    chooser = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(count):
            turns = []
            for _ in range(chooser.randint(1, 2)):
                for role in ("user", "assistant"):
                    text = " ".join(chooser.choices(WORDS, k=chooser.randint(3, 12)))
                    turns.append({"role": role, "content": text})
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.fixture(scope="session")
def target_dir(tiny_target_dir: Path) -> Path:
    """Training is tested on a tiny random target."""
    return tiny_target_dir


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl", 40)


@pytest.fixture
def recipe_file(tmp_path: Path, target_dir: Path, conversations: Path) -> Path:
    """A recipe that trains a tiny head in about fifty quick steps."""
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"""
target: {{path: {target_dir}}}
head: {{draft_vocab_size: 64}}
data:
  source: {conversations}
  max_length: 128
  row_tokens: 256
  prepared_dir: {tmp_path / "prepared"}
train:
  tokens_per_step: 512
  epochs: 4
  unroll_steps: 3
  learning_rate: 2.0e-3
validation: {{holdout: 0.2, limit: 4, max_new_tokens: 12, draft: "chain:3"}}
output: {{dir: {tmp_path / "out"}, save_every: 10}}
"""
    )
    return path


_CODE = """
import os, sys
sys.stderr = open({log!r}, "a", buffering=1)
os.environ.update({environment!r})
from headsmith.cli import run
from headsmith.train.{module} import {command}
sys.exit(run({command}, {arguments!r}))
"""


class Training:
    """`headsmith train ARGUMENTS` in a process forked from one that has everything imported."""

    module, command = "cli", "train"
    context = multiprocessing.get_context("forkserver")
    # The last one, where it is installed, imports torch's compiler: ten seconds for each process.
    context.set_forkserver_preload(
        [
            "headsmith.train.loop",
            "headsmith.inference.engine",
            "datasets",
            "torch.distributed.fsdp",
            "deepspeed.runtime.zero.muon.original_muon",
        ]
    )

    def __init__(self, log: Path, *arguments: str | Path, **environment: str) -> None:
        self.log = log
        code = _CODE.format(
            module=self.module,
            command=self.command,
            log=str(log),
            arguments=[str(a) for a in arguments],
            environment=environment,
        )
        self.process = self.context.Process(target=exec, args=(code,))
        self.process.start()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def finish(self, code: int = 0, timeout: float = 240) -> str:
        """Wait for the end; return what it said on stderr."""
        self.process.join(timeout)
        said = self.log.read_text() if self.log.exists() else ""
        assert self.process.exitcode == code, said
        return said

    def wait_for_step(self, folder: Path, step: int) -> None:
        """Wait until metrics.jsonl reaches a step, or the process is gone."""
        while self.process.is_alive():
            done = read_metrics(folder)
            if done and done[-1]["step"] >= step:
                return
            time.sleep(0.005)


class Capture(Training):
    """`headsmith data capture ARGUMENTS` in such a process."""

    module, command = "capture_cli", "capture"


def start_group(
    kind: type[Training], folder: Path, world: int, *arguments: str | Path, **environment: str
) -> list[Training]:
    """The same command in several processes, as torchrun starts them; logs go to `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    return [
        kind(folder / rank, *arguments, **group, **environment, RANK=rank, LOCAL_RANK=rank)
        for rank in map(str, range(world))
    ]


def read_metrics(folder: Path, *, without: tuple[str, ...] = ("seconds",)) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what may differ between runs: the time."""
    path = folder / "metrics.jsonl"
    text = path.read_text().splitlines() if path.exists() else []
    lines = [json.loads(line) for line in text if line.endswith("}")]
    return [{k: v for k, v in line.items() if k not in without} for line in lines]


@pytest.fixture
def training() -> type[Training]:
    """Starts `headsmith train` in processes of its own."""
    return Training


@pytest.fixture
def group() -> Callable[..., list[Training]]:
    """Starts a command in several processes that work together."""
    return start_group


@pytest.fixture
def captures() -> type[Training]:
    """Starts `headsmith data capture` in processes of its own."""
    return Capture


@pytest.fixture
def metrics() -> Callable[[Path], list[dict[str, Any]]]:
    """Reads the metrics.jsonl of a run's folder."""
    return read_metrics
