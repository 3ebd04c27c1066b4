"""Runs under vLLM's own Python, apart from headsmith: hidden states of token ids, to files.

Two things at once. As a program it reads lines of JSON from stdin: first how to load the target,
then lists of token ids; for every list it answers, on the descriptor that it was given, with the
safetensors file that holds their states. As a module it is the connector that vLLM loads by name:
vLLM's own one copies through pinned memory and CUDA events, which a CPU does not have.

Checked with vLLM 0.32.0.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Done:
    """Stands where vLLM keeps the event of a copy: what is written at once has been copied."""

    def query(self) -> bool:
        return True


class HiddenStates(ExampleHiddenStatesConnector):
    """Writes the states of a finished request before the engine goes on, on any device."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        count = len(pending.token_ids)
        states = extract_from_kv_cache(self._kv_cache, slots.to(self._kv_cache.device), count)
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        temporary = f"{pending.filename}.tmp"
        save_file(
            {"hidden_states": states.cpu().contiguous(), "token_ids": pending.token_ids.clone()},
            temporary,
        )
        os.replace(temporary, pending.filename)
        self._req_copy_events[pending.req_id] = _Done()


def load(settings: dict[str, Any]) -> Any:
    """The engine of vLLM that keeps the states `settings["layers"]` of every prompt."""
    from vllm import LLM

    return LLM(
        model=settings["target"],
        revision=settings["revision"],
        dtype=settings["dtype"],
        max_model_len=settings["longest"],
        enforce_eager=True,
        enable_prefix_caching=False,
        tensor_parallel_size=settings["devices"],
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": settings["layers"]}
            },
        },
        kv_transfer_config={
            "kv_connector": HiddenStates.__name__,
            "kv_connector_module_path": "vllm_worker",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": settings["folder"],
                "use_synchronization_lock": False,
            },
        },
    )


def run(llm: Any, prompts: list[list[int]]) -> list[str]:
    """The files with the states of the prompts, in their order, all written."""
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(requests, wanted, use_tqdm=False)
    files = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
    # The states of a request are written in the step behind its last one.
    for _ in range(100):
        if all(map(os.path.exists, files)):
            return files
        llm.llm_engine.step()
    raise RuntimeError("vLLM did not write the hidden states of a request")


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def answer(found: Any) -> None:
            print(json.dumps(found), file=answers, flush=True)

        llm = load(json.loads(sys.stdin.readline()))
        answer("ready")
        for line in sys.stdin:
            answer(run(llm, json.loads(line)))


if __name__ == "__main__":
    main()
