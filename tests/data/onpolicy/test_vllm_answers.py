"""vLLM as a process: what it is asked, what is made of its ids, and how it may fail."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headsmith.cli import cli, run
from headsmith.data.onpolicy.asking import Ask, Sampling
from headsmith.data.onpolicy.tokens import Prompt
from headsmith.data.onpolicy.vllm_answers import VllmProcess
from headsmith.errors import EnvironmentFault

# Says the last ids of the prompt backwards; what it was asked goes into a file.
FAKE = """
import json, os
from types import SimpleNamespace

__version__ = "0.0"
print("vLLM says a lot")


class SamplingParams:
    def __init__(self, **given):
        self.given = given


class LLM:
    def __init__(self, model, **engine):
        if "fail" in engine:
            raise ValueError("no such\\ndevice")
        self.engine = engine
        self.model_config = SimpleNamespace(max_model_len=engine.get("max_model_len", 300))
        with open(os.environ["ASKED"], "a") as file:
            print(json.dumps({"model": model, "engine": engine}), file=file)

    def generate(self, prompts, params, use_tqdm):
        with open(os.environ["ASKED"], "a") as file:
            print(json.dumps([one.given for one in params]), file=file)
        if "die" in self.engine:
            os._exit(7)
        print("and more")
        for prompt, one in zip(prompts, params):
            ids = prompt["prompt_token_ids"][::-1][: one.given["max_tokens"]]
            reason = "length" if len(ids) == one.given["max_tokens"] else "stop"
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, finish_reason=reason)])
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """Puts the fake in the way of every Python that is started; what it was asked, in order."""
    (tmp_path / "fake" / "vllm").mkdir(parents=True)
    (tmp_path / "fake" / "vllm" / "__init__.py").write_text(FAKE)
    path = os.pathsep.join([str(tmp_path / "fake"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path.rstrip(os.pathsep))
    log = tmp_path / "asked.jsonl"
    monkeypatch.setenv("ASKED", str(log))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_ids_come_back_for_the_prompts_that_they_continue(asked: Any) -> None:
    sampling = Sampling(5, temperature=0.5, top_k=3, seed=2)
    prompts = [Prompt(Ask(str(i), 0, []), list(range(i, 2 * i + 2))) for i in range(300)]
    found: dict[str, tuple[list[int], bool]] = {}
    engine = {"dtype": "float32", "max_model_len": 320}
    with VllmProcess("folder", sampling, engine, sys.executable) as vllm:
        assert (vllm.version, vllm.context) == ("0.0", 320)
        vllm.run(prompts, lambda prompt, ids, cut: found.update({prompt.ask.key: (ids, cut)}))
    assert found["0"] == ([1, 0], False) and found["7"] == ([15, 14, 13, 12, 11], True)
    assert found["299"] == ([599, 598, 597, 596, 595], True)
    start, first, second = asked()
    assert start == {"model": "folder", "engine": {"seed": 2, **engine}}
    assert [len(first), len(second)] == [256, 44]
    assert first[7] == {
        "max_tokens": 5,
        "temperature": 0.5,
        "detokenize": False,
        "seed": sampling.seed_of(prompts[7].ask),
        "top_k": 3,
    }
    # The last token of the context is the last of the answer.
    assert [second[-1]["max_tokens"], len(prompts[299].ids)] == [5, 301]
    assert len({one["seed"] for one in first}) == 256


def test_an_answer_ends_with_the_context(asked: Any) -> None:
    with VllmProcess("folder", Sampling(100), {}, sys.executable) as vllm:
        cut: list[Any] = []
        vllm.run([Prompt(Ask("k", 0, []), [1] * 290)], lambda *found: cut.append(found[1:]))
    assert cut == [([1] * 10, True)]
    assert "seed" not in asked()[1][0]


def test_the_command(
    asked: Any, tiny_target_dir: Path, source: str, tmp_path: Path, read: Any
) -> None:
    out = tmp_path / "out.jsonl"
    words = ["data", "regenerate", source, "--target", str(tiny_target_dir), "--out", str(out)]
    words += ["--vllm-python", sys.executable, "--max-new-tokens", "18"]
    assert run(cli, words) == 0
    row = read(out)[0]
    # "<|im_start|>assistant\n" backwards, byte by byte; special tokens are no text.
    assert row["messages"][1]["content"] == "tnatsissa\nneerg"
    assert len(read(out)) == 4 and len(asked()) == 3
    # All is there: vLLM is not started again.
    assert run(cli, words) == 0 and len(asked()) == 3


def test_faults_are_sentences(
    asked: Any, tiny_target_dir: Path, source: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = ["data", "regenerate", source, "--target", str(tiny_target_dir)]
    words += ["--out", str(tmp_path / "out.jsonl"), "--vllm-python", sys.executable]
    for engine, sentence in (
        ('{"fail": 1}', "vLLM failed (ValueError: no such device)"),
        ('{"die": 1}', "the vLLM process ended with code 7; what it said is above, and"),
    ):
        assert run(cli, [*words, "--vllm-args", engine]) == 4
        assert f"headsmith: error: {sentence}" in capsys.readouterr().err
    with pytest.raises(EnvironmentFault, match="ModuleNotFoundError|ended with code"):
        VllmProcess("folder", Sampling(5), {}, str(_python_without(tmp_path)))


def _python_without(folder: Path) -> Path:
    """A Python that says it has no vLLM."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH= exec "{sys.executable}" -S "$@"\n')
    script.chmod(0o755)
    return script
