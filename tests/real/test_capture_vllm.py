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


def compare(own: Store, theirs: Store, bound: float) -> None:
    """Every token's taps and last state differ by less than `bound` of their mean size."""
    for row in own.shard_of:
        some, others = own.read(row), theirs.read(row)
        for name in ("taps", "last"):
            gap = (some[name].float() - others[name].float()).abs()
            # By token and tap: the first token of a text is hundreds of times louder.
            size = some[name].float().abs().mean(-1)
            assert (gap.mean(-1) / size).max() < bound, (row, name)
        agreed = (some["choice"] == others["choice"]).float().mean()
        assert agreed > 1 - bound
        torch.testing.assert_close(others["logsumexp"], some["logsumexp"], rtol=bound, atol=0)


# A bfloat16 pass rounds in every block, and the two round in different places.
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_vllm_gives_the_features_of_transformers(
    target_dir: Path, tmp_path: Path, python: str, dtype: str, bound: float
) -> None:
    recipe = recipe_of(target_dir, tmp_path, dtype)
    stored = "float32" if dtype == "float32" else "bfloat16"
    own = capture(recipe, tmp_path / "own", stored, 256)
    theirs = capture(recipe, tmp_path / "theirs", stored, 256, Backend("vllm", python))
    compare(own, theirs, bound)


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
    compare(own, theirs, 1e-4)
