"""Launch configs and DEPLOY.md: shapes as measured, numbering of each engine, honest words."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from headsmith.errors import HeadsmithError
from headsmith.files import weights_sha256
from headsmith.models.formats.export import export
from headsmith.models.medusa_files import Calibration, write_calibration


def words(script: Path) -> list[str]:
    return shlex.split(script.read_text(), comments=True)


def after(flag: str, found: list[str]) -> str:
    return found[found.index(flag) + 1]


def test_vllm_is_given_the_measured_depth(eagle: Callable[..., Path], tmp_path: Path) -> None:
    export(eagle(draft="chain:5"), "vllm", tmp_path / "out")
    launch = tmp_path / "out/launch"
    config = json.loads((launch / "vllm_speculative_config.json").read_text())
    assert config == {
        "method": "eagle3",
        "model": str(tmp_path / "out"),
        "num_speculative_tokens": 5,
        "draft_tensor_parallel_size": 1,
    }
    ast.parse((launch / "vllm.py").read_text())
    subprocess.run(["sh", "-n", str(launch / "vllm.sh")], check=True)
    script = (launch / "vllm.sh").read_text()
    assert "tau 1.250" in script and "norm_output" not in script
    shown = script.replace("exec python -m vllm.entrypoints.openai.api_server", "printf '%s\\n'")
    printed = subprocess.run(
        ["sh", "-c", shown, str(launch / "vllm.sh")], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    given = json.loads(after("--speculative-config", printed))
    assert given == config


def test_trees_go_to_engines_that_draft_them(eagle: Callable[..., Path], tmp_path: Path) -> None:
    folder = eagle("eagle3.1", draft="tree:24,4,5", taps=(1, 3, 6))
    export(folder, "sglang", tmp_path / "sglang")
    found = words(tmp_path / "sglang/launch/sglang.sh")
    assert after("--speculative-algorithm", found) == "EAGLE3"
    assert after("--speculative-num-steps", found) == "5"
    assert after("--speculative-eagle-topk", found) == "4"
    assert after("--speculative-num-draft-tokens", found) == "25"
    script = (tmp_path / "sglang/launch/sglang.sh").read_text()
    for flag in ("fc_norm: true", "norm_output: true", "taps 1, 3, 6", "rope_theta 10000.0"):
        assert f"# {flag}" in script

    export(folder, "trtllm", tmp_path / "trtllm")
    config = yaml.safe_load((tmp_path / "trtllm/launch/trtllm.yaml").read_text())
    assert config["speculative_config"] == {
        "decoding_type": "Eagle3",
        "speculative_model": str(tmp_path / "trtllm"),
        "max_draft_len": 5,
        "eagle3_layers_to_capture": [0, 2, 5],
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_total_draft_tokens": 24,
    }
    export(folder, "vllm", tmp_path / "vllm")
    assert "a tree was measured" in (tmp_path / "vllm/launch/vllm.sh").read_text()


def test_a_chain_in_the_original_code(eagle: Callable[..., Path], tmp_path: Path) -> None:
    export(eagle(draft="chain:4"), "eagle", tmp_path / "out")
    call = ast.parse((tmp_path / "out/launch/eagle.py").read_text()).body[-1]
    assert isinstance(call, ast.Assign) and isinstance(call.value, ast.Call)
    given = {k.arg: k.value.value for k in call.value.keywords if isinstance(k.value, ast.Constant)}
    # Its depth counts the levels behind the first, and its tokens the root.
    assert (given["depth"], given["top_k"], given["total_token"]) == (3, 1, 5)


def test_the_tree_of_medusa_heads(medusa: Callable[..., Path], tmp_path: Path) -> None:
    folder = medusa("private", draft="stored")
    with pytest.raises(HeadsmithError, match="headsmith calibrate"):
        export(folder, "trtllm", tmp_path / "out")
    choices = [[0], [1], [0, 0], [0, 0, 2]]
    write_calibration(folder, Calibration(choices, [[0.5]], {}))
    export(folder, "trtllm", tmp_path / "out")
    config = yaml.safe_load((tmp_path / "out/launch/trtllm.yaml").read_text())
    assert config["speculative_config"]["medusa_choices"] == choices
    assert config["speculative_config"]["max_draft_len"] == 4
    assert json.loads((tmp_path / "out/config.json").read_text())["max_draft_len"] == 4
    export(folder, "tgi", tmp_path / "tgi")
    assert after("--speculate", words(tmp_path / "tgi/launch/tgi.sh")) == "3"
    export(folder, "vllm", tmp_path / "vllm")
    config = json.loads((tmp_path / "vllm/launch/vllm_speculative_config.json").read_text())
    assert (config["method"], config["num_speculative_tokens"]) == ("medusa", 3)


def test_a_result_of_this_head_counts_more_than_its_validation(
    eagle: Callable[..., Path], write: Callable[[str, str], Path], tmp_path: Path
) -> None:
    folder = eagle()
    result = {
        "schema": "headsmith.result/1",
        "created": "2026-01-02T03:04:05+00:00",
        "head": {"path": "x", "sha256": weights_sha256(folder)},
        "setup": {"draft": "chain:2", "rule": "greedy", "temperature": 0.0, "prompts": "default"},
        "overall": {"tau": 1.75, "requests": 60},
        "device": {"name": "a CPU"},
    }
    file = write("result.json", json.dumps(result))
    done = export(folder, "vllm", tmp_path / "out", result=file)
    assert done.facts.shape.depth == 2 and done.facts.tau == 1.75
    text = (tmp_path / "out/DEPLOY.md").read_text()
    assert "chain:2, tau 1.750" in text and "60 requests of default, a CPU" in text
    result["head"] = {"path": "other", "sha256": "0"}
    with pytest.raises(HeadsmithError, match="whose weights are not these"):
        export(folder, "vllm", tmp_path / "o", result=write("r.json", json.dumps(result)))
    with pytest.raises(HeadsmithError, match="not the result of headsmith eval"):
        export(folder, "vllm", tmp_path / "o", result=write("r.json", "{}"))


def test_deploy_says_what_was_not_checked(eagle: Callable[..., Path], tmp_path: Path) -> None:
    folder = eagle()
    about = json.loads((folder / "headsmith.json").read_text())
    del about["validation"]
    (folder / "headsmith.json").write_text(json.dumps(about))
    done = export(folder, "sglang", tmp_path / "out")
    text = (tmp_path / "out/DEPLOY.md").read_text()
    assert "**SGLang itself**: not checked" in text
    assert "40 of 40 drafts equal" in text and "LlamaForCausalLM" in text
    assert "| revision | not recorded |" in text
    assert "NOT measured" in (tmp_path / "out/launch/sglang.sh").read_text()
    assert any("was not measured" in line for line in done.warnings)
