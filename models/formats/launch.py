"""Launch configs beside an export: how each engine is told of the head, and what must match it."""

import json
from collections.abc import Callable
from typing import Any

import yaml

from headsmith.models.eagle3_config import Eagle3Config
from headsmith.models.formats.describe import ENGINES
from headsmith.models.formats.engine_options import sglang_options, vllm_config
from headsmith.models.formats.facts import Facts
from headsmith.models.formats.fit import traits
from headsmith.models.medusa_files import MedusaConfig

Config = Eagle3Config | MedusaConfig

_SHELL = """#!/bin/sh
# {title}
{comments}
HEAD=${{HEAD:-$(cd "$(dirname "$0")/.." && pwd)}}
TARGET=${{TARGET:-{target}}}
{command}
"""
_VLLM_PYTHON = '''"""{title}

{comments}
"""

from pathlib import Path

from vllm import LLM, SamplingParams

llm = LLM(
    model={target},
    speculative_config={{
        "method": "{method}",
        "model": str(Path(__file__).resolve().parent.parent),
        "num_speculative_tokens": {depth},
        "draft_tensor_parallel_size": 1,
    }},
)
messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
answer = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=128))
print(answer[0].outputs[0].text)
'''
_EAGLE_PYTHON = '''"""{title}

{comments}
"""

from pathlib import Path

from eagle.model.ea_model import EaModel

model = EaModel.from_pretrained(
    base_model_path={target},
    ea_model_path=str(Path(__file__).resolve().parent.parent),
    total_token={tokens},
    depth={depth},
    top_k={topk},
    use_eagle3=True,
)
'''


def launch_files(name: str, config: Config, facts: Facts, place: str) -> dict[str, str]:
    """Launch configs of an export to `name` that will lie in the folder `place`: file -> text."""
    return _MAKERS[name](name, config, facts, place)


def depth_of(config: Config, facts: Facts) -> int:
    """The depth that was measured; of Medusa heads at most their number."""
    if isinstance(config, MedusaConfig):
        return min(facts.shape.depth, config.num_heads)
    return facts.shape.depth


def what_must_match(config: Config, facts: Facts) -> list[str]:
    """One line for each property of the head that an engine must be given as it is."""
    lines = [f"target: {facts.serve_as}{_revision(facts)}; the head fits no other model"]
    if isinstance(config, MedusaConfig):
        lines.append(f"{config.num_heads} heads: an engine drafts at most that many tokens a pass")
        return lines
    for flag, words in _FLAGS.items():
        if getattr(config, flag):
            lines.append(f"{flag}: true in config.json; {words}")
    taps = ", ".join(map(str, config.taps))
    if "other taps" in traits(config):
        lines.append(
            f"taps {taps}: states before these blocks (vLLM's numbering; SGLang's and "
            "TensorRT-LLM's are one less)"
        )
    else:
        lines.append(f"taps {taps}: the default ones, so no engine has to be told")
    rope = config.rope
    lines.append(f"rope_theta {rope.get('rope_theta')}: as trained, whatever the target's is")
    context = config.max_position_embeddings
    lines.append(f"max_position_embeddings {context}: serve no longer context than this")
    return lines


_FLAGS = {
    "fc_norm": "a norm for each tap, of EAGLE-3.1",
    "norm_output": "the normed state is fed back, as in EAGLE-3.1; lost, only later drafts suffer",
    "norm_before_fc": "one norm over all taps",
    "norm_before_residual": "the residual starts from the normed state",
}


def _revision(facts: Facts) -> str:
    return f" at revision {facts.revision}" if facts.revision else ""


def _measured(facts: Facts) -> str:
    if facts.measured is None:
        return f"draft {facts.draft}: a default, NOT measured; measure it with headsmith eval"
    return f"draft {facts.draft}: as measured, tau {facts.tau:.3f} ({facts.measured})"


def _notes(config: Config, facts: Facts, *more: str) -> list[str]:
    return [*more, _measured(facts), *what_must_match(config, facts)]


def _hashed(lines: list[str]) -> str:
    return "\n".join(f"# {line}" for line in lines)


def _shell(title: str, notes: list[str], facts: Facts, words: list[str]) -> str:
    command = " \\\n  ".join(words)
    return _SHELL.format(
        title=title, comments=_hashed(notes), target=facts.serve_as, command=command
    )


def _vllm(name: str, config: Config, facts: Facts, place: str) -> dict[str, str]:
    method = "medusa" if isinstance(config, MedusaConfig) else "eagle3"
    depth = depth_of(config, facts)
    notes = [
        f"method {method}: always named, for vLLM otherwise guesses from the path",
        f"num_speculative_tokens {depth}: vLLM drafts chains",
        "draft_tensor_parallel_size 1: the head is too small to be split",
    ]
    if not facts.shape.is_chain:
        notes.append("a tree was measured and vLLM drafts none: expect a lower tau than below")
    notes = _notes(config, facts, *notes)
    speculative = vllm_config(method, place, depth)
    inline = json.dumps(speculative | {"model": "$HEAD"}).replace('"', '\\"')
    words = [
        "exec python -m vllm.entrypoints.openai.api_server",
        '--model "$TARGET"',
        f'--speculative-config "{inline}"',
        '"$@"',
    ]
    title = "Serve the target with this head in vLLM."
    return {
        "vllm_speculative_config.json": json.dumps(speculative, indent=2) + "\n",
        "vllm.sh": _shell(title, notes, facts, words),
        "vllm.py": _VLLM_PYTHON.format(
            title="Decode with this head in vLLM.",
            comments="\n".join(notes),
            target=json.dumps(facts.serve_as),
            method=method,
            depth=depth,
        ),
    }


def _sglang(name: str, config: Config, facts: Facts, place: str) -> dict[str, str]:
    assert isinstance(config, Eagle3Config)
    shape = facts.shape
    words = [
        "exec python -m sglang.launch_server",
        '--model-path "$TARGET"',
        *sglang_options('"$HEAD"', shape),
        "--tp 1",
    ]
    notes = [
        "EAGLE3, not EAGLE: that one reads no taps and accepts nothing, without an error",
        f"num-draft-tokens {shape.nodes + 1}: {shape.nodes} drafts and the root",
        "tp 1: one device, as it was measured",
    ]
    if config.sliding_window is not None:
        words.append(f"--speculative-draft-window-size {config.sliding_window}")
        notes.append(f"draft-window-size {config.sliding_window}: the head was trained with it")
    words.append('"$@"')
    title = "Serve the target with this head in SGLang."
    return {"sglang.sh": _shell(title, _notes(config, facts, *notes), facts, words)}


def _trtllm(name: str, config: Config, facts: Facts, place: str) -> dict[str, str]:
    shape = facts.shape
    speculative: dict[str, Any] = {"speculative_model": place}
    notes = ["speculative_model: older releases call it speculative_model_dir"]
    if isinstance(config, MedusaConfig):
        depth = depth_of(config, facts)
        paths = facts.paths or tuple((0,) * length for length in range(1, depth + 1))
        speculative |= {
            "decoding_type": "Medusa",
            "num_medusa_heads": config.num_heads,
            "max_draft_len": len(paths),
            "medusa_choices": [list(path) for path in paths],
        }
        notes.append(f"max_draft_len {len(paths)}: the drafts of the tree, without its root")
    else:
        speculative |= {"decoding_type": "Eagle3", "max_draft_len": shape.depth}
        if "other taps" in traits(config):
            outputs = [tap - 1 for tap in config.taps]
            speculative["eagle3_layers_to_capture"] = outputs
            notes.append(f"eagle3_layers_to_capture {outputs}: outputs of blocks, one below taps")
        if not shape.is_chain:
            speculative |= {
                "use_dynamic_tree": True,
                "dynamic_tree_max_topK": shape.topk,
                "max_total_draft_tokens": shape.nodes,
            }
    words = [
        "exec trtllm-serve",
        '"$TARGET"',
        '--extra_llm_api_options "$HEAD/launch/trtllm.yaml"',
        '"$@"',
    ]
    notes = _notes(config, facts, *notes)
    text = yaml.safe_dump({"tensor_parallel_size": 1, "speculative_config": speculative})
    title = "Serve the target with this head in TensorRT-LLM."
    return {
        "trtllm.yaml": f"{_hashed(notes)}\n{text}",
        "trtllm.sh": _shell(title, notes, facts, words),
    }


def _eagle(name: str, config: Config, facts: Facts, place: str) -> dict[str, str]:
    shape = facts.shape
    notes = _notes(
        config,
        facts,
        f"total_token {shape.nodes + 1}: {shape.nodes} drafts and the root",
        f"depth {shape.depth - 1}: its levels behind the first",
        "without embed_tokens in the export, the target needs a model.safetensors.index.json",
    )
    text = _EAGLE_PYTHON.format(
        title=f"Decode with this head in {ENGINES[name]}.",
        comments="\n".join(notes),
        target=json.dumps(facts.serve_as),
        tokens=shape.nodes + 1,
        depth=shape.depth - 1,
        topk=shape.topk,
    )
    return {"eagle.py": text}


def _tgi(name: str, config: Config, facts: Facts, place: str) -> dict[str, str]:
    depth = depth_of(config, facts)
    notes = [
        "model-id is the head: its base_model_name_or_path names the target",
        f"speculate {depth}: at most the number of heads; TGI drafts chains",
    ]
    if not facts.shape.is_chain:
        notes.append("a tree was measured and TGI drafts none: expect a lower tau than below")
    words = [
        "exec text-generation-launcher",
        '--model-id "$HEAD"',
        f"--speculate {depth}",
        "--num-shard 1",
        '"$@"',
    ]
    title = "Serve the target with these heads in Text Generation Inference."
    text = _shell(title, _notes(config, facts, *notes), facts, words)
    return {"tgi.sh": text.replace(f"TARGET=${{TARGET:-{facts.serve_as}}}\n", "")}


_MAKERS: dict[str, Callable[[str, Config, Facts, str], dict[str, str]]] = {
    "vllm": _vllm,
    "speculators": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "eagle": _eagle,
    "tgi": _tgi,
}
