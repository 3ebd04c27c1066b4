"""Several real processes train to the same losses as one."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headsmith.train.recipe import recipe_path

pytestmark = pytest.mark.slow
QUICK = ("train.max_steps=4", "output.save_every=2", "validation.limit=1", "data.max_rows=24")
MEDUSA = ("head.kind=medusa", "head.num_heads=3", "head.lm_head=truncated")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("world", "head"), [(2, ()), (3, ()), (2, MEDUSA)], ids=["eagle3-2", "eagle3-3", "medusa-2"]
)
def test_several_processes_train_as_one(
    recipe_file: Path,
    tmp_path: Path,
    training: Any,
    metrics: Any,
    world: int,
    head: tuple[str, ...],
) -> None:
    one, several, log = tmp_path / "one", tmp_path / "several", tmp_path / "log"
    training(log, recipe_file, *QUICK, *head, f"output.dir={one}").finish()
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    group |= {"LOCAL_WORLD_SIZE": str(world)}
    ranks = []
    for rank in map(str, range(world)):
        arguments = (recipe_file, *QUICK, *head, f"output.dir={several}")
        place = {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(training(tmp_path / rank, *arguments, **group, **place))
    said = [process.finish() for process in ranks]
    assert "vocabulary:" in said[0] and "vocabulary:" not in "".join(said[1:])
    assert len(metrics(several)) == 4
    for line, reference in zip(metrics(several), metrics(one), strict=True):
        for key, value in reference.items():
            assert line[key] == pytest.approx(value, rel=1e-6, abs=1e-6), (line["step"], key)
    assert (several / "latest").readlink() == (one / "latest").readlink()


NO_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed: headsmith[deepspeed]"
)


@pytest.mark.parametrize(
    "name", ["cpu-2", "cpu-2-fsdp2", pytest.param("cpu-2-zero3", marks=NO_DEEPSPEED)]
)
def test_accelerate_launches_two_processes_on_a_cpu(
    name: str, recipe_file: Path, tmp_path: Path, training: Any, metrics: Any
) -> None:
    config = f"--config_file={recipe_path(f'accelerate/{name}')}"
    command = ["-m", "accelerate.commands.launch", config, f"--main_process_port={free_port()}"]
    run = subprocess.run(
        [sys.executable, *command, "-m", "headsmith.train", str(recipe_file), *QUICK],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("vocabulary:") == 1, "only the first process speaks"
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2, 3, 4]
