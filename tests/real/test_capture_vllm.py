"""Features that vLLM computes are those of transformers, on the real target: in a process of its
own, and from a server.

Needs an environment of vLLM in HEADSMITH_VLLM_PYTHON (`make test-vllm` makes one).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headsmith.data.capture_vllm import WORKER
from headsmith.data.feature_store import Store
from headsmith.train.capture import Backend, capture
from headsmith.train.recipe import Recipe, load_recipe

pytestmark = pytest.mark.slow
LAYERS = [2, 15, 27, 30]


@pytest.fixture(scope="session")
def python() -> str:
    found = os.environ.get("HEADSMITH_VLLM_PYTHON")
    if not found:
        pytest.skip("no environment of vLLM: set HEADSMITH_VLLM_PYTHON (make test-vllm)")
    return found


def recipe_of(target_dir: Path, tmp_path: Path, dtype: str) -> Recipe:
    return load_recipe(
        "quickstart/eagle3",
        [
            f"target.path={target_dir}",
            f"target.dtype={dtype}",
            "data.max_rows=8",
            "data.max_length=256",
            "data.row_tokens=256",
            "validation.holdout=0",
            f"data.prepared_dir={tmp_path / 'prepared'}",
        ],
    )


def gaps(some: Store, others: Store) -> Tensor:
    """Relative distance of two stores' states, a mean over tokens for each tap and the last state:
    [taps + 1]. By token, for the first one of a text is hundreds of times louder.
    """
    found = []
    for name in ("taps", "last"):
        x, y = (
            torch.cat([s.read(row)[name] for row in some.shard_of]).float() for s in (some, others)
        )
        apart = (x - y).norm(dim=-1) / y.norm(dim=-1)
        found.append(apart.mean(0).reshape(-1))
    return torch.cat(found)


def agreed(some: Store, others: Store) -> float:
    """The share of equal first choices."""
    x, y = (torch.cat([s.read(row)["choice"] for row in some.shard_of]) for s in (some, others))
    return float((x == y).float().mean())


def test_vllm_gives_the_features_of_transformers(
    target_dir: Path, tmp_path: Path, python: str
) -> None:
    """In float32 the same; in bfloat16 both round, in different places, and are as far from it."""
    exact = recipe_of(target_dir, tmp_path, "float32")
    rounded = recipe_of(target_dir, tmp_path, "bfloat16")
    by = Backend("vllm", python)
    reference = capture(exact, tmp_path / "own-32", "float32", 256)
    theirs = capture(exact, tmp_path / "theirs-32", "float32", 256, by)
    assert gaps(theirs, reference).max() < 1e-5 and agreed(theirs, reference) == 1
    own = capture(rounded, tmp_path / "own-16", "bfloat16", 256)
    theirs = capture(rounded, tmp_path / "theirs-16", "bfloat16", 256, by)
    assert (gaps(theirs, reference) < 1.2 * gaps(own, reference)).all()
    assert agreed(theirs, reference) > agreed(own, reference) - 0.02


@contextmanager
def serving(python: str, target: Path, folder: Path) -> Iterator[str]:
    """vLLM's server as docs/features.md starts it."""
    shutil.copy(WORKER, folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}}
    extract = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": layers,
    }
    connector = {
        "kv_connector": "HiddenStates",
        "kv_connector_module_path": "vllm_worker",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(folder / "states"),
            "use_synchronization_lock": False,
        },
    }
    options = {
        "model": str(target),
        "dtype": "float32",
        "max-model-len": "512",
        "host": "127.0.0.1",
        "port": port,
        "speculative-config": json.dumps(extract),
        "kv-transfer-config": json.dumps(connector),
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--no-enable-prefix-caching", *(f"--{k}={v}" for k, v in options.items())]
    more = {"PYTHONPATH": str(folder), "VLLM_CPU_KVCACHE_SPACE": "1"}
    more |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, env=os.environ | more, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 200
        while not _answers(url):
            assert server.poll() is None and time.monotonic() < deadline, (
                folder / "log"
            ).read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def test_so_does_its_server(target_dir: Path, tmp_path: Path, python: str) -> None:
    recipe = recipe_of(target_dir, tmp_path, "float32")
    own = capture(recipe, tmp_path / "own", "float32", 256)
    with serving(python, target_dir, tmp_path) as url:
        theirs = capture(recipe, tmp_path / "theirs", "float32", 256, Backend("vllm", server=url))
    assert gaps(theirs, own).max() < 1e-5 and agreed(theirs, own) == 1
