"""The model card: front matter that the Hub reads, and a page that says what the head is for, how
its numbers were measured, how to serve it, and what it was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headsmith import __version__
from headsmith.models.hub.client import Repo
from headsmith.models.hub.launch import snippets
from headsmith.models.hub.measured import UNKNOWN, How, Measured

KINDS = {"eagle3": "EAGLE-3", "eagle3.1": "EAGLE-3.1", "medusa": "Medusa"}
_HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card is made from. `kind` of KINDS; `about` is headsmith.json as it is published;
    `cautions` are what doctor warns of.
    """

    repo: Repo
    target: str
    kind: str
    config: dict[str, Any]
    about: dict[str, Any]
    sha256: str
    measured: Measured
    cautions: list[str]
    license: str | None = None
    data: str | None = None


def make_card(facts: CardFacts) -> str:
    """The README.md of the repository."""
    parts = [_intro(facts), _measured(facts), _use(facts), _head(facts), _data(facts)]
    return f"---\n{_front_matter(facts)}\n---\n\n" + "\n\n".join(parts) + "\n"


def _front_matter(facts: CardFacts) -> str:
    from huggingface_hub import ModelCardData

    source = ((facts.about.get("data") or {}).get("source")) or ""
    # Only a data set of the Hub has a name that a reader could follow.
    datasets = [source] if source.count("/") == 1 and "." not in source else None
    data = ModelCardData(
        base_model=facts.target,
        library_name="headsmith",
        license=facts.license,
        pipeline_tag="text-generation",
        datasets=datasets,
        tags=["speculative-decoding", "draft-head", facts.kind.split(".")[0], "headsmith"],
        model_name=facts.repo.name.partition("/")[2],
        eval_results=_index(facts) or None,
    )
    return data.to_yaml().strip()


def _index(facts: CardFacts) -> list[Any]:
    """The numbers for the Hub's own table, each with how it was measured."""
    from huggingface_hub import EvalResult

    found = []

    def add(on: str, kind: str, name: str, value: float, how: How, **more: Any) -> None:
        args = {
            "draft": how.draft,
            "temperature": how.temperature,
            "template": how.template,
            "hardware": how.hardware,
            "dtype": how.dtype,
            "date": how.date,
            **more,
        }
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=on,
                dataset_name=on,
                metric_type=kind,
                metric_name=name,
                metric_value=value,
                metric_args=args,
            )
        )

    for one in facts.measured.acceptance:
        tau, rate = one.metrics["tau"], one.metrics.get("acceptance_rate")
        add(one.on, "acceptance_length", "tokens per verification pass", round(tau, 4), one.how)
        if rate is not None:
            add(one.on, "acceptance_rate", "accepted / proposed drafts", round(rate, 4), one.how)
    for row in facts.measured.speed:
        batch, value = row.row["batch"], round(row.row["speedup"], 3)
        add(row.on, "speedup", f"speed-up at batch {batch}", value, row.how, batch=batch)
    return found


def _intro(facts: CardFacts) -> str:
    name = facts.repo.name.partition("/")[2]
    lossy = "with greedy decoding or lossless sampling the output stays that of the target"
    return (
        f"# {name}\n\n"
        f"A draft head ({KINDS[facts.kind]}) for speculative decoding with "
        f"[{facts.target}]({_HUB}/{facts.target}). It proposes tokens that the target then checks "
        f"in one pass; {lossy}. It does nothing without that target."
    )


def _measured(facts: CardFacts) -> str:
    measured = facts.measured
    if not measured.acceptance:
        return "## Measured\n\nNothing of this head was measured when it was published."
    rows = [
        (one.on, _tau(one.metrics), _number(one.metrics.get("acceptance_rate")))
        + (one.metrics.get("requests", UNKNOWN), *_how(one.how), one.how.tokens)
        for one in measured.acceptance
    ]
    columns = ("On", "Tokens a pass", "Acceptance rate", "Prompts", *_HOW, "Answer limit")
    parts = ["## Measured", _table(columns, rows)]
    if measured.speed:
        columns = ("On", "Batch", "Tokens/s alone", "Tokens/s with the head", "Speed-up", *_HOW)
        timed = [
            (
                one.on,
                one.row["batch"],
                f"{one.row['baseline_tokens_per_s']:.1f}",
                f"{one.row['tokens_per_s']:.1f}",
                f"{one.row['speedup']:.2f}",
                *_how(one.how),
            )
            for one in measured.speed
        ]
        parts.append(_table(columns, timed))
    parts.append(
        "Tokens a pass: output tokens divided by verification passes, the target's own token "
        "counted, with the 95 % interval over conversations. Acceptance rate: accepted divided by "
        "proposed drafts; it depends on the draft. `chain:D` is D drafts in a row, `tree:N,K,D` N "
        "drafts of a tree with K children and depth D."
    )
    parts += [_items(measured.remarks)] if measured.remarks else []
    return "\n\n".join(parts)


_HOW = ("Draft", "Temperature", "Chat template", "Hardware", "Dtype", "Date")


def _how(how: How) -> tuple[str, ...]:
    return (how.draft, how.temperature, how.template, how.hardware, how.dtype, how.date)


def _use(facts: CardFacts) -> str:
    repo = facts.repo
    found = snippets(facts.config, repo.name, repo.revision, facts.target, facts.measured.draft)
    parts = ["## Use"]
    if facts.measured.draft is None:
        parts.append("The depth below is a guess: none was measured.")
    for one in found:
        parts.append(f"**{one.engine}.** {one.remark}")
        parts += [f"```{one.language}\n{one.text}\n```"] if one.text else []
    parts += ["Mind:\n\n" + _items(facts.cautions)] if facts.cautions else []
    return "\n\n".join(parts)


def _head(facts: CardFacts) -> str:
    own = facts.about.get("target") or {}
    head = facts.about.get("head") or {}
    rows = [
        ("Kind", KINDS[facts.kind]),
        ("Target", f"{facts.target}, revision {own.get('revision') or UNKNOWN}"),
        ("Target's name in training", own.get("path_in_training") or facts.target),
        ("Target fingerprint", own.get("fingerprint") or UNKNOWN),
        ("Taps (vLLM's numbering)", _taps(facts, head.get("taps"))),
        ("Draft vocabulary", _vocabulary(facts)),
        ("Weights", f"sha256:{facts.sha256}"),
        ("Made with", f"headsmith {facts.about.get('headsmith') or UNKNOWN}"),
    ]
    return "## Head\n\n" + _table(("", ""), rows)


def _taps(facts: CardFacts, recorded: list[int] | None) -> str:
    if facts.kind == "medusa":
        return "none; Medusa heads read the last state"
    named = facts.config.get("eagle_aux_hidden_state_layer_ids") or recorded
    return ", ".join(map(str, named)) if named else "the engines' default"


def _vocabulary(facts: CardFacts) -> str:
    config = facts.config
    drafted = config.get("draft_vocab_size") or config.get("truncated_vocab_size")
    whole = config.get("transformer_layer_config", config).get("vocab_size")
    return f"{drafted or whole} of {whole} ids"


def _data(facts: CardFacts) -> str:
    data, training = facts.about.get("data") or {}, facts.about.get("training") or {}
    recipe = (facts.about.get("recipe") or {}).get("data") or {}
    parts = ["## Training data"]
    parts += [facts.data] if facts.data else []
    if data:
        rows = [
            ("Source", data.get("source", UNKNOWN)),
            ("Fingerprint", data.get("fingerprint", UNKNOWN)),
            ("Rows prepared", data.get("rows", UNKNOWN)),
            ("Tokens, of them trained on", f"{data.get('tokens')}, {data.get('trained_tokens')}"),
            ("Longest conversation in tokens", recipe.get("max_length", UNKNOWN)),
            ("Optimiser steps", training.get("step", UNKNOWN)),
            ("Tokens in all steps", training.get("tokens", UNKNOWN)),
        ]
        parts.append(_table(("", ""), rows))
        parts.append("The whole recipe is in `headsmith.json`.")
    elif not facts.data:
        parts.append("What it was trained on was not recorded.")
    parts.append("## Licence")
    parts.append(
        f"{facts.license}." if facts.license else "No licence was named by who published this head."
    )
    parts.append(
        f"The licence of {facts.target} holds for the target, and that of the training data for "
        f"the data.\n\nThis page was written by headsmith {__version__} from the files of the head."
    )
    return "\n\n".join(parts)


def _tau(metrics: dict[str, Any]) -> str:
    interval = metrics.get("tau_ci")
    more = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return f"{metrics['tau']:.3f}{more}"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _items(sentences: list[str]) -> str:
    return "\n".join(_lines(sentences))


def _lines(sentences: list[str]) -> Iterator[str]:
    for one in sentences:
        text = " ".join(one.split())
        yield f"- {text[:1].upper()}{text[1:]}"
