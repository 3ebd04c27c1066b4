"""Decoding with and without kernels: `python benchmarks/gpu_decode.py --shape NAME ...`.

A part of benchmarks/gpu.sh. Shapes: `trained`, a target with its trained head (--target, --head),
whose acceptance is its own and whose greedy text is checked; `llama-8b` and `qwen3-30b-a3b`, random
weights in those sizes with an EAGLE-3 head of the right size, where acceptance is forced: the
target's choices are replaced so that a set number of drafts is kept, after everything has been
computed. With --dry the shapes are tiny and the device is the CPU.

For each batch size: transformers' `generate`, plain decoding, a chain and a tree, in tokens a
second; without kernels, with kernels whose tables the host makes, and in rounds that stay on the
device, as CUDA graphs. A run says which kernels ran, and whether graphs did. The command exits with
3 if the target says other than its text, and with 1 if a dense target was not captured on a GPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from gpu_forced import Forced
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from headsmith.cli import run
from headsmith.errors import EqualityFailed, GateNotMet, HeadsmithError
from headsmith.files import write_json
from headsmith.inference.engine import Decoder
from headsmith.inference.environment import pick_device
from headsmith.inference.equality import check_equality
from headsmith.inference.kernels import VARIABLE
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.records import Request
from headsmith.inference.resident.rounds import VARIABLE as ROUNDS
from headsmith.inference.speed import Arm, ratio
from headsmith.inference.tree import parse_shape
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.heads import Head, load_head
from headsmith.models.target import Target

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
QWEN = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
}
SHAPES = ("trained", "llama-8b", "qwen3-30b-a3b")
DRAFTED_IDS = 32000


def random_target(shape: str, device: torch.device, tokenizer: Any, *, dry: bool) -> Target:
    """Random weights in the sizes of a model, bfloat16 (float32 when dry)."""
    kind, sizes = (LlamaConfig, LLAMA) if shape == "llama-8b" else (Qwen3MoeConfig, QWEN)
    if dry:
        sizes = {name: TINY[name] for name in sizes}
    config: Any = kind(**sizes, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    dtype = torch.float32 if dry else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Target(model, tokenizer, shape)


@contextmanager
def kernels(wish: str) -> Iterator[None]:
    """With this wish for kernels, and behind a `/` for rounds."""
    before = {name: os.environ.get(name) for name in (VARIABLE, ROUNDS)}
    for name, value in zip(before, wish.partition("/")[::2], strict=True):
        os.environ[name] = value or "graph"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def prompts(vocab: int, count: int, length: int) -> list[Request]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(min(vocab, 10000), (count, length), generator=generator).tolist()
    return [Request(f"r{i}", "random", row) for i, row in enumerate(ids)]


def questions(target: Target, count: int, length: int) -> list[Request]:
    """The first prompts of the default task, of each the last `length` tokens at most."""
    builder = RequestBuilder(target.tokenizer, target.max_context)
    asked = [builder.build(one) for one in load_prompts("default", limit=count)]
    return [replace(one, prompt_ids=one.prompt_ids[-length:]) for one in asked]


@dataclass(frozen=True)
class Sizes:
    """Prompt and answer lengths, batch sizes, drafts with what is forced of each."""

    prompt: int
    new: int
    batches: tuple[int, ...]
    drafts: tuple[tuple[str, float], ...]


REAL = Sizes(512, 48, (1, 4, 16), (("chain:5", 3.0), ("tree:60,10,6", 4.0)))
DRY = Sizes(9, 5, (2,), (("chain:2", 2.0), ("tree:5,2,3", 2.5)))


def decoded(
    target: Target,
    head: Head | None,
    draft: str,
    tau: float | None,
    requests: list[Request],
    new: int,
) -> tuple[dict[str, Any], Arm]:
    """One decoder over one batch of requests, after a run that is not counted."""
    drafter = None if head is None else make_drafter(head, target, parse_shape(draft))
    batch = len(requests)
    decoder = Decoder(target, drafter, batch=batch, max_new_tokens=new)
    if tau is not None:
        decoder.judge = Forced(target, decoder.rule, decoder.stop, tau=tau)
    arm = Arm(decoder)
    decoder.generate(requests)
    decoder.kernels = set()
    arm.run(requests, None)
    per_round = 1000 / max(1, len(decoder.rounds))
    row = {
        "draft": draft if head is not None else "none",
        "batch": batch,
        "tokens_per_s": ratio(arm.committed, arm.phases.decode_s),
        "tau": ratio(arm.committed, arm.passes),
        "draft_ms": arm.phases.draft_s * per_round,
        "verify_ms": arm.phases.verify_s * per_round,
        "other_ms": arm.phases.other_s * per_round,
        "kernels": sorted(decoder.kernels),
    }
    return row, arm


def generated(model: Any, target: Target, requests: list[Request], new: int) -> dict[str, Any]:
    """transformers' `generate` over the ends of the same prompts, as long as the shortest of them,
    so that none is padded. Decoding alone: a run of one token is subtracted.
    """
    batch, shortest = len(requests), min(len(request.prompt_ids) for request in requests)
    rows = [request.prompt_ids[-shortest:] for request in requests]
    ids = torch.tensor(rows, device=target.device)

    def seconds(new: int) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new}
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    seconds(2)
    rest = seconds(new) - seconds(1)
    rate = batch * (new - 1) / rest if rest > 0 else None
    return {"draft": "generate", "batch": batch, "tokens_per_s": rate, "kernels": []}


def own_attention(model: Any) -> Any:
    """The same model with transformers' attention for as long as `generate` runs."""
    model.set_attn_implementation("sdpa")
    return model


@click.command()
@click.option("--shape", type=click.Choice(SHAPES), required=True)
@click.option("--target", required=True, help="The trained target; the tokenizer of the others.")
@click.option("--head", help="The trained head, for --shape trained.")
@click.option(
    "--kernels",
    "wishes",
    default="off,auto/host,auto",
    show_default=True,
    help="Wishes, in turn: HEADSMITH_KERNELS, or with HEADSMITH_ROUNDS behind a slash.",
)
@click.option("--dry", is_flag=True, help="Tiny shapes on the CPU.")
@click.option("--json", "path", type=Path, help="Write the rows here.")
def main(
    shape: str, target: str, head: str | None, wishes: str, dry: bool, path: Path | None
) -> None:
    """Measure one shape; print a line each."""
    device, sizes = pick_device("cpu" if dry else "cuda"), DRY if dry else REAL
    dtype = torch.float32 if dry else torch.bfloat16
    trained = Target.load(target, dtype=dtype, device=device, blocks=shape == "trained")
    if shape == "trained":
        if head is None:
            raise HeadsmithError("--shape trained needs --head DIR")
        model, mine = trained, load_head(head, trained, dtype=dtype, device=device)
    else:
        model = random_target(shape, device, trained.tokenizer, dry=dry)
        drafted = min(DRAFTED_IDS, model.vocab_size)
        taps = (0, 1, 2) if dry else None
        mine = Eagle3Head.for_target(model, torch.arange(drafted), taps=taps).to(device, dtype)
    if dry:
        from headsmith.inference.kernels.interpreter import exchange_once

        exchange_once()
    most = max(sizes.batches)
    requests = (
        questions(model, most, sizes.prompt)
        if shape == "trained"
        else prompts(model.vocab_size, most, sizes.prompt)
    )
    rows: list[dict[str, Any]] = []
    wrong = 0
    for wish in wishes.split(","):
        with kernels(wish):
            for batch in sizes.batches:
                for draft, tau in (("none", None), *sizes.drafts):
                    forced = None if shape == "trained" else tau
                    used = None if draft == "none" else mine
                    row, arm = decoded(model, used, draft, forced, requests[:batch], sizes.new)
                    if shape == "trained":
                        wrong += check_equality(model, arm.responses).fails
                    rows.append({"shape": shape, "wish": wish, **row})
                    say(rows[-1])
    own = own_attention(model.model)
    for batch in sizes.batches:
        found = generated(own, model, requests[:batch], sizes.new)
        rows.append({"shape": shape, "wish": "", **found})
        say(rows[-1])
    if path is not None:
        write_json(path, rows)
    if wrong:
        raise EqualityFailed(f"{wrong} output tokens are not the target's own")
    captured = [row for row in rows if row["wish"] == "auto"]
    if not dry and shape != "qwen3-30b-a3b":
        for row in captured:
            if "CUDA graphs" not in row["kernels"]:
                raise GateNotMet(f"batch {row['batch']}, {row['draft']}: no CUDA graph ran")


def say(row: dict[str, Any]) -> None:
    """A line."""
    rate = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"
    tau = f", tau {row['tau']:.2f}" if row.get("tau") else ""
    ran = ", ".join(row["kernels"]) or "no kernels"
    click.echo(
        f"{row['shape']} {row['wish']} batch {row['batch']} {row['draft']}: {rate} tokens/s{tau} "
        f"({ran})"
    )


if __name__ == "__main__":
    sys.exit(run(main, name="gpu_decode.py"))
