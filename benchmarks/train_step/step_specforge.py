"""The training step of SpecForge as a worker of compare.py: its model and optimiser through their
public interface, in an environment of their own.

Its loss is a Triton kernel, which a CPU cannot run: the same sum in plain torch stands in.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from specforge.algorithms.eagle3 import model as package
from specforge.modeling.draft import LlamaForCausalLMEagle3
from specforge.optimizer import BF16Optimizer
from step_worker import Answers, serve
from transformers import LlamaConfig


def plain_loss(logits: Any, target: Any, mask: Any) -> Any:
    """Cross entropy of the target's probabilities, averaged over all positions."""
    said = (target * logits.float().log_softmax(-1)).sum(-1, keepdim=True)
    return -(said * mask).mean()


class PlainLoss:
    """`plain_loss` where an autograd function is expected."""

    apply = staticmethod(plain_loss)


def build(settings: dict[str, Any]) -> Answers:
    """The answers of this program."""
    package.LogSoftmaxLoss = PlainLoss
    torch.set_num_threads(settings["threads"])
    data = torch.load(settings["data"], weights_only=True)
    case, dtype = data["case"], getattr(torch, settings["precision"])
    torch.manual_seed(0)
    body = LlamaConfig(
        hidden_size=case["width"],
        intermediate_size=case["intermediate"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        head_dim=case["head_dim"],
        vocab_size=case["vocab"],
        draft_vocab_size=case["draft_vocab"],
        target_hidden_size=case["width"],
        num_hidden_layers=1,
        max_position_embeddings=4096,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    draft = LlamaForCausalLMEagle3(body, attention_backend="sdpa")
    ids = data["draft_ids"]
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(data["embedding"])
        draft.t2d.zero_()[ids] = True
        draft.d2t.copy_(ids - torch.arange(len(ids)))
    draft.embed_tokens.weight.requires_grad_(False)
    draft.lm_head.weight.requires_grad_(case["lm_head"])
    draft = draft.to(dtype)
    model = package.OnlineEagle3Model(draft, length=case["steps"], attention_backend="sdpa")
    optimiser = BF16Optimizer(draft, lr=1e-4)
    shape = case["documents"], case["length"]
    # Its batches are shifted by one before they reach the model.
    last = data["last"].view(*shape, -1).to(dtype).roll(-1, 1)
    mask = data["mask"].view(*shape).roll(-1, 1).clone()
    mask[:, -1] = False
    given = {
        "input_ids": data["ids"].view(shape).roll(-1, 1),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "loss_mask": mask[..., None].long(),
        "hidden_states": data["taps"].view(*shape, -1).to(dtype),
        "target": None,
        "target_hidden_for_compact": last,
        "target_head_weight": data["embedding"].to(dtype),
    }

    def step() -> dict[str, Any]:
        losses = model(**given)[0]
        loss = sum(0.8**k * one for k, one in enumerate(losses))
        loss.backward()
        optimiser.step()
        return {"loss": float(loss.detach())}

    def about() -> str:
        return f"{settings['precision']} weights, sdpa, compact teacher"

    return {"settings": about, "step": step}


if __name__ == "__main__":
    serve({"version": importlib.metadata.version("specforge")}, build)
