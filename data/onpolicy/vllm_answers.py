"""vLLM, offline, as one that continues token ids: in this Python or, as a process, in another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headsmith.data.onpolicy.asking import Sampling
from headsmith.data.onpolicy.tokens import Prompt
from headsmith.errors import EnvironmentFault, HeadsmithError

WORKER = Path(__file__).with_name("vllm_worker.py")
# Prompts of one call. vLLM batches them as it likes; what a kill loses is at most these.
_CALL = 256


class VllmProcess:
    """vLLM with the model in a folder, in a process of `python`; close it, or use it with `with`.

    `engine` are further arguments of `vllm.LLM`. `context` is what it has room for, in tokens.
    Raises EnvironmentFault when vLLM cannot be started, there or here.
    """

    def __init__(
        self, folder: str, sampling: Sampling, engine: Mapping[str, Any], python: str | None = None
    ) -> None:
        if python is None and find_spec("vllm") is None:
            raise EnvironmentFault(
                "vllm is not installed in this Python; install it (headsmith[vllm]), or name a "
                "Python that has it with --vllm-python"
            )
        self.sampling = sampling
        # Greedy and drawn answers are reproducible only if every request has a seed of its own;
        # the engine's seed is for what is left.
        engine = {"seed": sampling.seed, **engine}
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise HeadsmithError(
                f"{python} cannot be started ({error.strerror}); name a Python with --vllm-python"
            ) from error
        try:
            self._send({"model": folder, "engine": engine})
            ready = self._receive()
        except BaseException:
            self.close()
            raise
        self.version, self.context = str(ready["ready"]), int(ready["context"])

    def __enter__(self) -> VllmProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def run(
        self, prompts: Sequence[Prompt], done: Callable[[Prompt, list[int], bool], None]
    ) -> None:
        """Continue all prompts; `done` as in `tokens.Continue`."""
        for start in range(0, len(prompts), _CALL):
            call = prompts[start : start + _CALL]
            self._send(
                {
                    "prompts": [prompt.ids for prompt in call],
                    "sampling": [self._sampling(prompt) for prompt in call],
                }
            )
            for prompt in call:
                line = self._receive()
                done(prompt, line["ids"], line["cut"])

    def _sampling(self, prompt: Prompt) -> dict[str, Any]:
        """Arguments of vllm.SamplingParams; the text is made of the ids here, not there."""
        given = self.sampling
        arguments: dict[str, Any] = {
            # An answer ends where the context does.
            "max_tokens": min(given.max_new_tokens, self.context - len(prompt.ids)),
            "temperature": given.temperature,
            "detokenize": False,
        }
        if given.temperature:
            arguments["seed"] = given.seed_of(prompt.ask)
        for name, value in (("top_p", given.top_p), ("top_k", given.top_k)):
            if value is not None:
                arguments[name] = value
        return arguments

    def _send(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # What it said before it went is the better reason.
            self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text.endswith("\n"):
            code = self._process.wait()
            raise EnvironmentFault(
                f"the vLLM process ended with code {code}; what it said is above, and the same "
                "command goes on from what is finished"
            )
        line: dict[str, Any] = json.loads(text)
        if "fault" in line:
            raise EnvironmentFault(f"vLLM failed ({line['fault'].rstrip('.')})")
        return line
