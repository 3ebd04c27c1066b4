"""Is the decoder's own overhead small? Two questions on one machine, in one run:

    python benchmarks/decode.py --head DIR --prompts default:24

1. Costs of the stages are measured on the first half of the prompts (`headsmith profile`), tau and
   speedup on the second half. The measured speedup over plain decoding should be at least 0.85 of
   tau / (c_v + steps c_d + c_o).
2. On the second half transformers' `generate` takes turns with both. Plain decoding should take no
   longer for the same answers, prompts included.

Greedy, batch 1. Exits with 1 where one of the two does not hold, with 3 where a text differs from
that of plain decoding by more than near ties.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM

from headsmith.cli import run
from headsmith.errors import EqualityFailed, GateNotMet, HeadsmithError
from headsmith.files import write_json
from headsmith.inference.costs import profile_batch
from headsmith.inference.environment import DTYPES, device_info, versions
from headsmith.inference.equality import check_equality
from headsmith.inference.evaluate import load_session
from headsmith.inference.machine import measure_machine
from headsmith.inference.records import Phases, Request, Response
from headsmith.inference.settings import EvalSettings
from headsmith.inference.speed import Arm, alternate, ratio, speed_row
from headsmith.models.loading import locate
from headsmith.models.target import Target

LEAST = 0.85


class Transformers:
    """`generate(do_sample=False)` of the target with its own attention, one prompt at a time."""

    def __init__(self, target: Target, dtype: torch.dtype, new_tokens: int) -> None:
        place, extra = locate(target.path)
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **extra)
        self.model, self.new_tokens = model.eval().to(target.device), new_tokens

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None] | None = None,
    ) -> tuple[list[Response], Phases]:
        responses = []
        for request in requests:
            begin = time.perf_counter()
            ids = torch.tensor([request.prompt_ids], device=self.model.device)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=self.new_tokens,
            )
            new = out[0, ids.shape[1] :].tolist()
            seconds = time.perf_counter() - begin
            responses.append(Response(request, new, "length", [], 0.0, seconds, [seconds]))
        return responses, Phases()


def whole_speed(arm: Arm) -> float | None:
    """Output tokens a second of everything, prompts included."""
    return ratio(sum(len(r.output_ids) for r in arm.responses), arm.seconds)


def measure(settings: EvalSettings) -> dict[str, Any]:
    """Both questions' figures."""
    session = load_session(settings)
    requests = [session.builder.build(one) for one in session.conversations]
    if len(requests) < 2:
        raise HeadsmithError("two prompts at least: one for the costs, one for the speed")
    # Every second one, so that both halves hold all tasks.
    first, second = requests[::2], requests[1::2]
    target = session.target
    machine = measure_machine(target.device, target.dtype)
    costs = profile_batch(session, first, 1, machine)
    generate = Arm(Transformers(target, DTYPES[settings.dtype], settings.max_new_tokens))
    plain, drafted = (Arm(session.decoder(1, plain=one)) for one in (True, False))
    arms = [generate, plain, drafted]
    for arm in arms:
        arm.decoder.generate(second[:1])
    alternate(arms, second, 1)
    speed = speed_row(drafted, plain, batch=1, peak_memory_bytes=None, head_bytes=None)
    tau = ratio(drafted.committed, drafted.passes)
    cost = costs["model"]["break_even"]
    predicted = None if tau is None else tau / cost
    texts = [[r.output_ids for r in arm.responses] for arm in arms]
    equality = check_equality(target, drafted.responses, rule=settings.make_rule())
    return {
        "versions": versions(),
        "device": device_info(target.device),
        "dtype": settings.dtype,
        "draft": settings.draft,
        "requests": len(second),
        "costs": costs,
        "tau": tau,
        "predicted_speedup": predicted,
        "speedup": speed["speedup"],
        "of_prediction": ratio(speed["speedup"], predicted),
        "plain_tokens_per_s": whole_speed(plain),
        "generate_tokens_per_s": whole_speed(generate),
        "drafted_tokens_per_s": whole_speed(drafted),
        "plain_over_generate": ratio(whole_speed(plain), whole_speed(generate)),
        "drafted_over_generate": ratio(whole_speed(drafted), whole_speed(generate)),
        "texts_of_generate": sum(a == b for a, b in zip(texts[0], texts[1], strict=True)),
        "texts_of_plain": sum(a == b for a, b in zip(texts[1], texts[2], strict=True)),
        "fails": equality.fails,
    }


def sentences(found: dict[str, Any]) -> list[str]:
    """What was found."""
    model, count = found["costs"]["model"], found["requests"]
    return [
        f"costs in plain rounds of {model['plain_ms']:.2f} ms: c_v {model['c_v']:.3f}, c_d "
        f"{model['c_d']:.3f} (of {model['steps']} steps), c_o {model['c_o']:.3f}; together "
        f"{model['break_even']:.3f}",
        f"tau {found['tau']:.3f}: predicted {found['predicted_speedup']:.3f}, measured "
        f"{found['speedup']:.3f} times plain decoding, {found['of_prediction']:.3f} of the "
        f"prediction (at least {LEAST} wanted)",
        f"whole answers, prompts included: transformers' generate "
        f"{found['generate_tokens_per_s']:.1f} tokens/s, plain {found['plain_tokens_per_s']:.1f} "
        f"({found['plain_over_generate']:.3f} times generate), drafted "
        f"{found['drafted_tokens_per_s']:.1f} ({found['drafted_over_generate']:.3f} times)",
        f"texts: {found['texts_of_generate']} of {count} plain ones are generate's, "
        f"{found['texts_of_plain']} of {count} drafted ones the plain decoder's; "
        f"{found['fails']} tokens are not the target's",
    ]


@click.command()
@click.option("--head", required=True, help="Folder of the head.")
@click.option("--target", help="Folder, Hub id or GGUF file. [default: the head's own target]")
@click.option("--prompts", default="default:24", show_default=True, help="As in headsmith eval.")
@click.option("--data-dir", help="As in headsmith eval.")
@click.option("--draft", default="chain:4", show_default=True)
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--threads", type=int, help="CPU threads of torch.")
@click.option("--json", "json_path", type=Path, help="Write everything here.")
@click.option("--no-verdict", is_flag=True, help="Only print; exit with 0 whatever was measured.")
def main(json_path: Path | None, no_verdict: bool, **options: Any) -> None:
    """Measure overhead: the prediction of the cost model, and transformers' generate."""
    found = measure(EvalSettings(**options))
    for line in sentences(found):
        click.echo(line)
    if json_path is not None:
        write_json(json_path, found)
    if found["fails"]:
        raise EqualityFailed(f"{found['fails']} output tokens are not the target's own")
    if no_verdict:
        return
    if found["of_prediction"] < LEAST:
        raise GateNotMet(f"the speedup is {found['of_prediction']:.3f} of the prediction")
    if found["plain_over_generate"] < 1:
        raise GateNotMet(f"plain decoding is {found['plain_over_generate']:.3f} times generate")


if __name__ == "__main__":
    sys.exit(run(main, name="decode.py"))
