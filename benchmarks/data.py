"""What the data room costs: `python benchmarks/data.py [--target T] [--source FILE]`.

Prints CPU seconds (the machine may be shared) for masking one conversation of 256 turns, for
counting and choosing a draft vocabulary, and rows a second of `prepare`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # noqa: F401  (imported here so that its start-up is not measured)
import torch

from headsmith.data.cli import load_tokenizer
from headsmith.data.mask import encode
from headsmith.data.prepare import prepare
from headsmith.data.vocabulary import count_ids, draft_vocabulary

TURNS = 256
WORDS = "the of a model reads every token once and answers in plain words about code maths".split()
VOCAB, DRAFT, TOKENS = 150_000, 32_000, 1_000_000


def seconds(work: Callable[[], Any], repeats: int = 3) -> tuple[float, float]:
    """The least (CPU, wall) seconds of `work`."""
    best = (float("inf"), float("inf"))
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        best = min(best, (time.process_time() - cpu, time.perf_counter() - wall))
    return best


def conversation(turns: int, seed: int) -> list[dict[str, str]]:
    """Turns of 40 to 160 words."""
    pick = torch.Generator().manual_seed(seed)
    messages = []
    for turn in range(turns):
        length = int(torch.randint(40, 160, (), generator=pick))
        words = torch.randint(len(WORDS), (length,), generator=pick).tolist()
        content = " ".join(WORDS[word] for word in words)
        messages.append({"role": ("user", "assistant")[turn % 2], "content": content})
    return messages


def mask(tokenizer: Any) -> None:
    messages = conversation(TURNS, seed=0)
    tokens = len(encode(tokenizer, messages).ids)
    cpu, wall = seconds(lambda: encode(tokenizer, messages))
    print(f"mask {TURNS} turns, {tokens:,} tokens: {cpu:.3f} s CPU, {wall:.3f} s wall")


def vocabulary() -> None:
    pick = torch.Generator().manual_seed(0)
    ids = (torch.rand(TOKENS, generator=pick) ** 4 * VOCAB).long()
    trained = torch.rand(TOKENS, generator=pick) < 0.7
    cpu, wall = seconds(lambda: draft_vocabulary(count_ids(ids, trained, VOCAB), DRAFT, [0, 1]))
    print(f"vocabulary {DRAFT:,} of {VOCAB:,} ids from {TOKENS:,} tokens: ", end="")
    print(f"{cpu:.3f} s CPU, {wall:.3f} s wall")


def preparation(tokenizer: Any, source: Path | None, rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if source is None:
            source = Path(folder) / "data.jsonl"
            made = (json.dumps({"messages": conversation(8, seed)}) for seed in range(rows))
            source.write_text("\n".join(made))
        cpu, wall = time.process_time(), time.perf_counter()
        info = prepare(source, tokenizer, Path(folder) / "out", max_rows=rows).info
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(
        f"prepare {info['read']:,} records, {info['rows']:,} rows, {info['tokens']:,} tokens: "
        f"{info['rows'] / cpu:.0f} rows/s CPU, {info['rows'] / wall:.0f} wall, "
        f"{info['tokens'] / cpu:,.0f} tokens/s CPU"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--source", type=Path, help="conversations to prepare (default: made up)")
    parser.add_argument("--rows", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.target)
    mask(tokenizer)
    vocabulary()
    preparation(tokenizer, args.source, args.rows)


if __name__ == "__main__":
    main()
