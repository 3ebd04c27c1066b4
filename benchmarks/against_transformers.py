"""Is the drafted text what transformers' own `generate` gives, token for token?

    python benchmarks/against_transformers.py --head DIR --prompts gsm8k:20 --data-dir DIR

Greedy, float32, first turns. `generate` runs with the model's own attention, one prompt at a time;
the decoder of this project runs every combination of --batch and --draft. Exits with 3 on any
difference, and prints where it is.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from headsmith.inference.engine import Decoder
from headsmith.inference.equality import check_equality
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.prompts import RequestBuilder, load_prompts
from headsmith.inference.records import Request, Response
from headsmith.inference.tree import parse_shape
from headsmith.models.heads import load_head
from headsmith.models.loading import locate
from headsmith.models.target import Target


def reference(target: Target, requests: Sequence[Request], new_tokens: int) -> list[list[int]]:
    """Output ids of `generate(do_sample=False)`, end-of-sequence included."""
    place, extra = locate(target.path)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **extra).eval()
    texts = []
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens)
        texts.append(out[0, ids.shape[1] :].tolist())
    return texts


def differences(responses: Sequence[Response], expected: Sequence[list[int]]) -> list[str]:
    """Ids of the requests whose output is not the expected one."""
    pairs = zip(responses, expected, strict=True)
    return [r.request.id for r, ids in pairs if r.output_ids != ids]


def main() -> None:
    """Compare, print a line a combination."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--head", required=True)
    parser.add_argument("--prompts", default="default")
    parser.add_argument("--data-dir")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--draft", nargs="+", default=["chain:4", "tree:24,4,5"])
    args = parser.parse_args()
    target = Target.load(args.target)
    head = load_head(args.head, target)
    builder = RequestBuilder(target.tokenizer, target.max_context)
    conversations = load_prompts(args.prompts, data_dir=args.data_dir)
    requests = [builder.build(conversation) for conversation in conversations]
    started = time.perf_counter()
    expected = reference(target, requests, args.max_new_tokens)
    print(
        f"transformers: {len(expected)} answers in {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    unequal = 0
    for draft in args.draft:
        drafter = make_drafter(head, target, parse_shape(draft))
        for batch in args.batch:
            decoder = Decoder(target, drafter, batch=batch, max_new_tokens=args.max_new_tokens)
            started = time.perf_counter()
            responses, _ = decoder.generate(requests)
            seconds = time.perf_counter() - started
            wrong = differences(responses, expected)
            judged = check_equality(target, responses) if batch == args.batch[0] else None
            passes = sum(len(r.passes) for r in responses)
            tau = sum(len(r.output_ids) - 1 for r in responses) / passes
            margin = (
                f"; {judged.exact} exact, {judged.ties} ties, {judged.fails} fails"
                if judged
                else ""
            )
            print(
                f"{draft} batch {batch}: {len(responses) - len(wrong)} of {len(responses)} equal, "
                f"tau {tau:.3f}, {seconds:.0f} s{margin} {wrong or ''}",
                flush=True,
            )
            unequal += len(wrong)
    sys.exit(3 if unequal else 0)


if __name__ == "__main__":
    main()
