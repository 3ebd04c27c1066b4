"""What an export says beside its tensors: whose head it is, and how it was measured."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headsmith.errors import HeadsmithError
from headsmith.files import weights_sha256
from headsmith.models.formats.engine_options import (
    DEFAULT_DEPTH,
    DEFAULT_DRAFT,
    Shape,
    parse_numbers,
)
from headsmith.models.provenance import read_provenance
from headsmith.models.results import read_result


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a head.

    target, revision, num_layers, architectures: of the target, as far as known. serve_as: the name
    under which an engine finds it. draft: the shape that was measured; tau and how it was measured,
    or None. paths: rank paths of a tree of Medusa heads.
    """

    target: str | None
    revision: str | None
    num_layers: int | None
    serve_as: str
    architectures: tuple[str, ...] = ()
    max_context: int | None = None
    draft: str = DEFAULT_DRAFT
    shape: Shape = Shape.chain(DEFAULT_DEPTH)
    paths: tuple[tuple[int, ...], ...] = ()
    tau: float | None = None
    measured: str | None = None


def read_facts(
    head: Path, target: str | None, serve_as: str | None, result: str | Path | None
) -> Facts:
    """What headsmith.json, the target's config and a result.json say of the head in `head`.

    Raises HeadsmithError for a result.json of another head, and where no target is known.
    """
    about = read_provenance(head) or {}
    own = about.get("target") or {}
    path = target or own.get("path")
    if path is None and serve_as is None:
        raise HeadsmithError(
            f"{head} has no headsmith.json that names its target, which the export must name; add "
            "--target"
        )
    config = target_config(path)
    facts = Facts(
        target=path,
        revision=own.get("revision"),
        num_layers=own.get("num_layers") or config.get("num_hidden_layers"),
        serve_as=serve_as or str(path),
        architectures=tuple(config.get("architectures") or ()),
        max_context=config.get("max_position_embeddings"),
    )
    draft, tau, measured = _measured(head, about, result)
    return replace(with_draft(facts, head, draft), tau=tau, measured=measured)


def with_draft(facts: Facts, head: Path, draft: str) -> Facts:
    """The facts with a draft shape, as `headsmith eval --draft` spells it."""
    shape = parse_numbers(draft)
    if shape is not None:
        return replace(facts, draft=draft, shape=shape, paths=())
    if draft.partition(":")[0] in ("stored", "medusa"):
        return _with_tree(facts, head, draft)
    raise HeadsmithError(f"the measured draft {draft!r} is no shape that an engine can be told")


def _with_tree(facts: Facts, head: Path, draft: str) -> Facts:
    """The tree that is stored beside Medusa heads; one of another size was not kept."""
    from headsmith.models.medusa_files import read_calibration

    stored = read_calibration(head)
    if stored is None:
        raise HeadsmithError(
            f"the measured draft {draft} is a tree, and {head} has none stored; run headsmith "
            "calibrate, or give a result of a chain"
        )
    paths = tuple(tuple(path) for path in stored.choices)
    _, _, size = draft.partition(":")
    if size and int(size) != len(paths):
        raise HeadsmithError(
            f"the measured draft {draft} has {size} drafts and the tree stored in {head} has "
            f"{len(paths)}; run headsmith calibrate --nodes {size}"
        )
    shape = Shape(max(map(len, paths)), 1 + max(path[-1] for path in paths), len(paths))
    return replace(facts, draft=draft, shape=shape, paths=paths)


def _measured(
    head: Path, about: dict[str, Any], result: str | Path | None
) -> tuple[str, float | None, str | None]:
    """Draft, tau, and how they were measured: from the result that is given, else from the
    validation of the run that made the head.
    """
    if result is not None:
        return _from_result(head, Path(result))
    validation = about.get("validation") or {}
    asked = ((about.get("recipe") or {}).get("validation") or {}).get("draft")
    if asked is None or validation.get("tau") is None:
        return DEFAULT_DRAFT, None, None
    how = (
        f"validation of its training run, greedy, {validation.get('requests')} held-out requests "
        f"and {validation.get('passes')} passes"
    )
    return asked, validation["tau"], how


def _from_result(head: Path, file: Path) -> tuple[str, float | None, str | None]:
    result = read_result(file, weights_sha256(head))
    setup, overall = result.get("setup") or {}, result.get("overall") or {}
    device = (result.get("device") or {}).get("name") or (result.get("device") or {}).get("type")
    how = (
        f"headsmith eval, rule {setup.get('rule')}, temperature {setup.get('temperature')}, "
        f"{overall.get('requests')} requests of {setup.get('prompts')}, {device}, "
        f"{result.get('created')}"
    )
    return setup.get("draft") or DEFAULT_DRAFT, overall.get("tau"), how


def target_config(path: str | None) -> dict[str, Any]:
    """The config.json of a target that lies here; empty for one that does not."""
    from headsmith.models import embedded

    if path is None:
        return {}
    known = embedded.resolve(path) if path in embedded.SOURCES else None
    file = Path(known or path).expanduser() / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    text = raw.get("text_config")
    return {**raw, **text} if isinstance(text, dict) else dict(raw)
