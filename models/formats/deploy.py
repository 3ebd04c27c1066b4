"""DEPLOY.md: whose head an export is, for which engine, and what was checked and what was not."""

from typing import Any

from headsmith import __version__
from headsmith.models.eagle3_config import Eagle3Config
from headsmith.models.formats.check import Checked
from headsmith.models.formats.describe import ENGINES
from headsmith.models.formats.facts import Facts
from headsmith.models.formats.launch import Config, what_must_match

# What of an engine was seen to work, and with what; the rest was never run. A row is added when a
# test of the repository has loaded such an export in the engine itself.
CHECKED_ENGINES: dict[tuple[str, str], str] = {}

_TEXT = """# {title}

| | |
|---|---|
| target | {target} |
| revision | {revision} |
| target family | {family} |
| head | {kind}, {drafts} |
| weights | {dtype} |
| measured | {measured} |
| written by | headsmith {version} |

## What was checked

- **This export**: read back from its files by a loader that shares no code with the writer and
  knows {engine}'s own rules: {checked}.
- **{engine} itself**: {engine_checked}.

## Start it

{files}

## What must match the head

{match}
{warnings}"""


def deploy_text(
    name: str,
    config: Config,
    about: dict[str, Any],
    facts: Facts,
    files: list[str],
    checked: Checked,
    dtype: str,
    warnings: list[str],
) -> str:
    """The text of DEPLOY.md; `about` is the head's own description of itself."""
    kind = str(about["kind"])
    engine = ENGINES[name]
    tau = "" if facts.tau is None else f", tau {facts.tau:.3f}"
    return _TEXT.format(
        title=f"{kind} head for {facts.serve_as}, {engine}",
        target=facts.serve_as,
        revision=facts.revision or "not recorded",
        family=", ".join(facts.architectures) or "not known here (its config.json is elsewhere)",
        kind=kind,
        drafts=_drafts(config),
        dtype=dtype,
        measured=f"{facts.draft}{tau}; {facts.measured or 'not measured'}",
        version=__version__,
        engine=engine,
        checked=checked,
        engine_checked=CHECKED_ENGINES.get(
            (name, kind), "not checked: no version of it has loaded this export"
        ),
        files="\n".join(f"- `{_use(file)}`" for file in files),
        match="\n".join(f"- {line}" for line in what_must_match(config, facts)),
        warnings="".join(f"\n> {line}\n" for line in warnings),
    )


def _drafts(config: Config) -> str:
    size, vocab = config.draft_vocab_size, config.vocab_size
    share = f"drafts {size} of {vocab} ids"
    if isinstance(config, Eagle3Config):
        return share
    return (
        f"{config.num_heads} heads of {config.num_layers} layers, lm_head {config.lm_head}, {share}"
    )


def _use(file: str) -> str:
    """How a launch config is used."""
    starts = {".sh": "sh ", ".py": "python "}
    return starts.get(file[file.rindex(".") :], "") + f"launch/{file}"
