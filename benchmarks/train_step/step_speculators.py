"""The training step of the speculators package as a worker of compare.py: its model, its loss and
its optimisers through their public interface, in an environment of their own.
"""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.optimizers import build_optimizers
from step_case import Case, llama
from step_worker import Answers, serve

# What the trainer of the package uses when nothing else is said.
OPTIMISER = {
    "lr": 1e-4,
    "weight_decay": 0.01,
    "muon_lr": 1e-3,
    "muon_momentum": 0.95,
    "muon_weight_decay": 0.1,
    "muon_ns_steps": 5,
    "muon_adjust_lr_fn": None,
}


def make_model(data: dict[str, Any], attention: str) -> torch.nn.Module:
    """A plain EAGLE-3 head of the case, with the target's rows as lm_head."""
    case = data["case"]
    body = llama(Case(**case))
    body._attn_implementation = attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=body,
        draft_vocab_size=case["draft_vocab"],
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[2, 15, 27],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=case["steps"])],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config)
    ids = data["draft_ids"]
    t2d = torch.zeros(case["vocab"], dtype=torch.bool)
    t2d[ids] = True
    model.load_vocab_mappings(t2d, ids - torch.arange(len(ids)))
    with torch.no_grad():
        model.embed_tokens.weight.copy_(data["embedding"])
        model.verifier_norm.weight.fill_(1.0)
        for matrix in (model.lm_head.weight, model.verifier_lm_head.weight):
            matrix.copy_(data["embedding"][ids])
        for parameter in model.parameters():
            # What its own initialisation has left open.
            if parameter.isnan().any():
                parameter.normal_(0.0, 0.02)
    model.verifier_lm_head.weight.requires_grad_(False)
    model.embed_tokens.weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(case["lm_head"])
    return model.float()


def build(settings: dict[str, Any]) -> Answers:
    """The answers of this program."""
    torch.set_num_threads(settings["threads"])
    data = torch.load(settings["data"], weights_only=True)
    case, lengths = data["case"], data["lengths"]
    attention = settings.get("attention") or "sdpa"
    torch.manual_seed(0)
    model = make_model(data, attention)
    name = "adamw" if settings["optimiser"] == "adamw" else "muon"
    optimisers = build_optimizers(model, SimpleNamespace(optimizer=name, **OPTIMISER))
    narrow = settings["precision"] == "bfloat16"
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    # Row i reads the next token and says what follows it, in the package as with us.
    mask = data["mask"].roll(-1).clone()
    mask[torch.tensor(lengths).cumsum(0) - 1] = False
    given = {
        "hidden_states": data["taps"].flatten(1)[None],
        "input_ids": data["ids"].roll(-1)[None],
        "document_ids": documents[None],
        "loss_mask": mask[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "verifier_last_hidden_states": data["last"].roll(-1, 0)[None],
        "ttt_steps": case["steps"],
        # Its own loss in plain torch; the fused one is for GPUs.
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }

    def step() -> dict[str, Any]:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            _, loss, _ = model(**given)
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        return {"loss": float(loss.detach())}

    def about() -> str:
        return f"{settings['precision']}, {attention}, {name}"

    return {"settings": about, "step": step}


if __name__ == "__main__":
    serve({"version": importlib.metadata.version("speculators")}, build)
