"""`headsmith data regenerate`: parse, bring conversations and whoever answers together, print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headsmith.answerers import BACKENDS, DEFAULT_TARGET, MAKERS, chosen, json_object

if TYPE_CHECKING:
    from headsmith.data.onpolicy.run import Regenerated


@click.command()
@click.argument("sources", nargs=-1, required=True)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSONL to write."
)
@click.option("--split", help="Split of a source that has several.  [default: train]")
@click.option("--revision", help="Commit, branch or tag of a Hub data set.")
@click.option("--limit", type=click.IntRange(min=1), help="First N conversations.  [default: all]")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    help="Who answers: this project's engine, a server, or vLLM offline.  [default: server if "
    "--server is given, vllm if --vllm-python is, else engine]",
)
@click.option(
    "--target", help=f"Folder, Hub id or GGUF file.  [default: the head's own, or {DEFAULT_TARGET}]"
)
@click.option("--max-new-tokens", default=256, show_default=True, help="Longest answer, in tokens.")
@click.option(
    "--temperature", default=0.0, show_default=True, help="0 is greedy; above, answers are drawn."
)
@click.option("--top-p", type=float, help="Draw from the fewest tokens that have P together.")
@click.option("--top-k", type=int, help="Draw from the K likeliest tokens only.")
@click.option("--seed", default=0, show_default=True, help="What is drawn depends on it.")
@click.option("--system-prompt", help="Put before conversations that have no system message.")
@click.option(
    "--thinking",
    type=click.Choice(["keep", "drop"]),
    default="keep",
    show_default=True,
    help="What becomes of thinking spans, in what is stored and in what later turns see.",
)
@click.option(
    "--thinking-tags",
    help="OPEN,CLOSE of a span.  [default: what the target's tokenizer or template has]",
)
@click.option("--template-args", help="JSON object for the chat template, such as enable_thinking.")
@click.option(
    "--unfinished",
    type=click.Choice(["drop", "keep"]),
    default="drop",
    show_default=True,
    help="Conversations with an answer that could not be had: left out, or kept up to there.",
)
@click.option(
    "--cut-answers",
    type=click.Choice(["keep", "drop"]),
    default="keep",
    show_default=True,
    help="Conversations with an answer that --max-new-tokens ended.",
)
@click.option("--batch", default=16, show_default=True, help="Engine: conversations at a time.")
@click.option("--head", help="Engine: a head that drafts; the text stays the same.")
@click.option("--drafter", help="Engine: what else drafts, as in headsmith eval: ngram, lookahead.")
@click.option("--draft", default="", help="Engine: shape of the drafts.  [default: chain:4]")
@click.option("--dtype", default="float32", show_default=True, help="Engine: or bfloat16, float16.")
@click.option("--device", default="auto", show_default=True, help="Engine: cpu, cuda, cuda:1.")
@click.option(
    "--server", help="Address of an OpenAI-compatible server, such as http://HOST:8000/v1."
)
@click.option("--model", help="Server: the model's name there.")
@click.option("--concurrency", default=16, show_default=True, help="Server: requests at a time.")
@click.option(
    "--retries", default=6, show_default=True, help="Server: times a request is repeated."
)
@click.option("--timeout", default=600.0, show_default=True, help="Server: seconds for an answer.")
@click.option(
    "--api-key-env",
    default="OPENAI_API_KEY",
    show_default=True,
    help="Server: environment variable that holds the key, if there is one.",
)
@click.option("--vllm-python", help="vLLM: the Python that has it.  [default: this one]")
@click.option("--vllm-args", help="vLLM: JSON object of further arguments of vllm.LLM.")
def regenerate(**options: Any) -> None:
    """Let the target answer every turn of SOURCES again, for training on its own text.

    SOURCES are conversations (JSON array, JSON Lines, Arrow, Parquet, a Hub id), prompts (rows of
    `prompt` or `turns`), or `default`, the evaluation prompts. Answers that they have are not
    used. Started again, it goes on where it was.
    """
    from headsmith.data.chats import Chats
    from headsmith.data.lines import check_out
    from headsmith.data.onpolicy.asking import Sampling
    from headsmith.data.onpolicy.dialogues import dialogues
    from headsmith.data.onpolicy.run import regenerate as answer

    backend = chosen(options, click.get_current_context())
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
    sampling = Sampling(**{name: options[name] for name in names})
    options["template_args"] = json_object(options["template_args"], "template-args")
    check_out(options["out"], options["sources"])
    chats = Chats(options["sources"], options["split"], options["revision"])
    found = dialogues(chats, options["system_prompt"], options["limit"])
    with ExitStack() as stack:
        own, answerer = MAKERS[backend](options, sampling, stack)
        settings = {
            "backend": backend,
            **own,
            **sampling.describe(),
            "thinking": options["thinking"],
            "template-args": options["template_args"],
            "system-prompt": options["system_prompt"],
        }
        with _bar() as progress:
            result = answer(
                found,
                answerer,
                options["out"],
                settings,
                unfinished=options["unfinished"],
                cut=options["cut_answers"],
                progress=progress,
            )
    _print(options["out"], result, chats.skipped, chats.warnings)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that counts answers, with an ETA."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("ETA"),
        Remaining(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("answers", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print(out: Path, result: Regenerated, skipped: Any, warnings: list[str]) -> None:
    """What became of every conversation."""
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    written = result.kept + result.answered
    said = f"{out}: {written} conversations ({result.answered} new, {result.kept} from before)"
    if result.cut:
        said += f"; the limit cut an answer in {result.cut}"
    if result.partial:
        said += f"; {result.partial} end before their last turn"
    click.echo(said, err=True)
    for reason, count in result.left_out.most_common():
        detail = result.details.get(reason)
        more = f" (such as: {detail})" if detail else ""
        click.echo(f"left out, {reason.replace('_', ' ')}: {count}{more}", err=True)
    if result.left_out["error"]:
        click.echo("the same command asks those that ended in an error again", err=True)
    for reason, count in skipped.most_common():
        click.echo(f"not read, {reason}: {count}", err=True)
