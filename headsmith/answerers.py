"""Whoever answers for `headsmith data regenerate`, made of its options."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from headsmith.errors import HeadsmithError

if TYPE_CHECKING:
    from headsmith.data.onpolicy.asking import Answerer, Sampling

    # What the texts depend on, by name, and what makes the answerer when there is something to ask.
    Made = tuple[dict[str, Any], Callable[[], Answerer]]

DEFAULT_TARGET = "smollm2-135m-instruct"
# The options that only one of them reads.
BACKENDS = {
    "engine": "batch head drafter draft dtype device".split(),
    "server": "server model concurrency retries timeout api_key_env".split(),
    "vllm": "vllm_python vllm_args".split(),
}


def chosen(options: Mapping[str, Any], context: click.Context) -> str:
    """Who answers; an option of one of the others is refused, for it would do nothing."""
    named = options["backend"]
    if named is None:
        named = "server" if options["server"] else "vllm" if options["vllm_python"] else "engine"
    for other, names in BACKENDS.items():
        for name in names if other != named else ():
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise HeadsmithError(
                    f"--{name.replace('_', '-')} is for the {other}, and the {named} answers; "
                    f"leave it out, or add --backend {other}"
                )
    return str(named)


def json_object(text: str | None, option: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise HeadsmithError(f"{option} is no JSON ({error}); give for example '{{}}'") from error
    if not isinstance(value, dict):
        raise HeadsmithError(f"{option} is {text}; it must be a JSON object")
    return value


def _engine(options: Mapping[str, Any], sampling: Sampling, stack: ExitStack) -> Made:
    from headsmith.data.onpolicy.thinking import choose
    from headsmith.data.onpolicy.tokens import Prompt, TokenAnswerer
    from headsmith.inference.answers import EngineAnswers, Prompted
    from headsmith.inference.settings import EvalSettings
    from headsmith.models.provenance import target_info

    head, target = options["head"], options["target"]
    if (options["drafter"] or "").startswith("text"):
        raise HeadsmithError("drafter text expects an answer, and here none is known; name another")
    settings = EvalSettings(
        target=target or (None if head else DEFAULT_TARGET),
        head=head,
        drafter=options["drafter"] or ("head" if head else "none"),
        rule="sample" if sampling.temperature else "greedy",
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_new_tokens=sampling.max_new_tokens,
        batch=(options["batch"],),
        **{name: options[name] for name in ("draft", "dtype", "device")},
    )
    engine = EngineAnswers(settings)
    for warning in engine.warnings:
        click.echo(f"warning: {warning}", err=True)
    tokenizer = engine.target.tokenizer
    thinking = choose(options["thinking"] == "keep", options["thinking_tags"], tokenizer)

    def proceed(prompts: Any, done: Any) -> None:
        asked: list[Prompt] = list(prompts)
        given = [Prompted(one.ask.key, one.ask.turn, one.ids) for one in asked]
        engine.run(given, lambda number, ids, cut: done(asked[number], ids, cut))

    answerer = TokenAnswerer(
        proceed, tokenizer, engine.target.max_context, thinking, options["template_args"]
    )
    known = {
        "target": target_info(engine.target)["fingerprint"],
        "dtype": options["dtype"],
        "thinking-tags": thinking.tags,
    }
    return known, lambda: answerer


def _server(options: Mapping[str, Any], sampling: Sampling, stack: ExitStack) -> Made:
    from headsmith.data.cli import load_tokenizer
    from headsmith.data.onpolicy.chat_server import ServerAnswerer
    from headsmith.data.onpolicy.thinking import choose

    for name in ("server", "model"):
        if not options[name]:
            raise HeadsmithError(f"a server answers, but which? add --{name}")
    tokenizer = load_tokenizer(options["target"]) if options["target"] else None
    thinking = choose(options["thinking"] == "keep", options["thinking_tags"], tokenizer)
    answerer = ServerAnswerer(
        options["server"],
        options["model"],
        sampling,
        thinking,
        concurrency=options["concurrency"],
        retries=options["retries"],
        timeout_s=options["timeout"],
        api_key=os.environ.get(options["api_key_env"]) or None,
        template_args=options["template_args"],
    )
    return {"model": options["model"], "thinking-tags": thinking.tags}, lambda: answerer


def _vllm(options: Mapping[str, Any], sampling: Sampling, stack: ExitStack) -> Made:
    from headsmith.data.cli import load_tokenizer
    from headsmith.data.onpolicy.thinking import choose
    from headsmith.data.onpolicy.tokens import TokenAnswerer
    from headsmith.data.onpolicy.vllm_answers import VllmProcess
    from headsmith.models import loading

    target = options["target"] or DEFAULT_TARGET
    folder, extra = loading.locate(target)
    if extra:
        raise HeadsmithError(
            f"{target} is a GGUF file, which vLLM is not given here; give a folder"
        )
    tokenizer = load_tokenizer(target)
    thinking = choose(options["thinking"] == "keep", options["thinking_tags"], tokenizer)
    engine = json_object(options["vllm_args"], "vllm-args")

    def start() -> Answerer:
        vllm = stack.enter_context(VllmProcess(folder, sampling, engine, options["vllm_python"]))
        click.echo(f"vLLM {vllm.version}, context {vllm.context}", err=True)
        args = options["template_args"]
        return TokenAnswerer(vllm.run, tokenizer, vllm.context, thinking, args)

    known = {
        "target": target,
        "tokenizer": hashlib.sha256(loading.tokenizer_bytes(tokenizer)).hexdigest(),
        "vllm-args": engine,
        "thinking-tags": thinking.tags,
    }
    return known, start


MAKERS: dict[str, Callable[[Mapping[str, Any], Sampling, ExitStack], Made]] = {
    "engine": _engine,
    "server": _server,
    "vllm": _vllm,
}
