"""States of the target from a vLLM server elsewhere, which shares a folder with this machine.

The server is started with hidden-state extraction (docs/features.md). A completion of one token
names the file that holds the states of its prompt.
"""

from __future__ import annotations

import fcntl
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headsmith.data.capture_vllm import VllmStates, layers_of
from headsmith.errors import EnvironmentFault
from headsmith.models.target import Target

# Requests that are open at a time: enough for the server to batch.
_OPEN = 16
# How long an answer may take, and how long its file may take to appear behind it.
_SECONDS_FOR_AN_ANSWER, _SECONDS_FOR_A_FILE = 600.0, 30.0


def server_states(target: Target, taps: tuple[int, ...], url: str) -> VllmStates:
    """States from the server at `url`. Of the target only the ends are needed here.

    Raises EnvironmentFault when nothing answers there.
    """
    server = _Server(url.rstrip("/"))
    return VllmStates(target, taps, layers_of(target, taps), server.files)


@dataclass
class _Server:
    url: str
    model: str = ""

    def files(self, prompts: list[list[int]]) -> list[Path]:
        """The files with the states of the prompts, all written."""
        if not self.model:
            self.model = self._ask("/v1/models")["data"][0]["id"]
        with ThreadPoolExecutor(_OPEN) as pool:
            return list(pool.map(self._file, prompts))

    def _file(self, ids: list[int]) -> Path:
        wanted = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        named = self._ask("/v1/completions", wanted).get("kv_transfer_params") or {}
        if "hidden_states_path" not in named:
            raise EnvironmentFault(
                f"the server {self.url} keeps no hidden states; start it as docs/features.md says"
            )
        return _written(Path(named["hidden_states_path"]), self.url)

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS_FOR_AN_ANSWER) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())[:300]
            raise EnvironmentFault(
                f"the server {self.url} refuses a request ({error.code}): {said}"
            ) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise EnvironmentFault(
                f"no vLLM server answers at {self.url} ({reason}); check --vllm-server"
            ) from error


def _written(file: Path, url: str) -> Path:
    """`file`, once the server has written all of it."""
    deadline = time.monotonic() + _SECONDS_FOR_A_FILE
    while not file.exists():
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"{file}, in which the server {url} says it put states, does not appear on this "
                "machine; its shared_storage_path must be a folder that both see"
            )
        time.sleep(0.02)
    # vLLM's own connector writes behind its answer, and holds this lock until it has.
    lock = file.with_name(file.name + ".lock")
    if lock.exists():
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_SH)
        lock.unlink(missing_ok=True)
    return file
