"""Runs inside vLLM's own environment: decode given prompts and record what was drafted.

    python vllm_runner.py JOB.json TRACE.json

JOB: target, prompts (lists of ids), max_new_tokens, stop_ids, and speculative_config or null.
TRACE: for each prompt output_ids and drafts (one list a proposal), and vLLM's own counters. vLLM is
unmodified; the methods that propose are only watched, in process (spec/engines.md 1 and 6).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# Before vLLM is imported. With more than one thread it is many times slower on a busy machine.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def watch(proposals: list[list[list[int]]]) -> None:
    """Append what every proposer returns to `proposals`."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.spec_decode.medusa import MedusaProposer

    for proposer in (SpecDecodeBaseProposer, MedusaProposer):
        own = proposer.propose

        def watched(self: Any, *args: Any, own: Any = own, **named: Any) -> Any:
            drafted = own(self, *args, **named)
            proposals.append(drafted.tolist())
            return drafted

        proposer.propose = watched


def counters(llm: Any) -> dict[str, float]:
    """vLLM's counts of drafts, drafted tokens and accepted tokens."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_") and hasattr(metric, "value"):
            found[metric.name.removeprefix("vllm:spec_decode_")] = metric.value
    return found


def main(job_file: str, trace_file: str) -> None:
    from vllm import LLM, SamplingParams, __version__

    job = json.loads(Path(job_file).read_text())
    proposals: list[list[list[int]]] = []
    watch(proposals)
    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=1,
        max_model_len=job["max_model_len"],
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=job["speculative_config"],
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["stop_ids"]
    )
    requests = []
    for prompt in job["prompts"]:
        proposals.clear()
        (answer,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        requests.append(
            {
                "output_ids": list(answer.outputs[0].token_ids),
                "drafts": [row for rows in proposals for row in rows],
            }
        )
    trace = {"vllm": __version__, "requests": requests, "counters": counters(llm)}
    Path(trace_file).write_text(json.dumps(trace))


if __name__ == "__main__":
    main(*sys.argv[1:])
