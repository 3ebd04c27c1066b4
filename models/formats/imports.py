"""Import a head that somebody else made: read in its own numbering and names, kept natively.

What is open in a foreign checkpoint is asked for, never guessed: tap ids that two projects number
differently (spec/eagle.md 1.1), and SpecForge's `norm_output`, which meant something else until
its PR #879 (spec/eagle.md 2.1).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headsmith import __version__
from headsmith.errors import HeadsmithError
from headsmith.files import atomic_folder, weights_sha256, write_json
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.formats.export import stored_dtype
from headsmith.models.formats.facts import target_config
from headsmith.models.formats.import_medusa import is_original, read_original
from headsmith.models.heads import Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import MODEL_TYPE
from headsmith.models.provenance import FILE, check_pair, target_info
from headsmith.models.strict import read_json, read_tensors
from headsmith.models.target import Target

# Who counts outputs of blocks: their id i is the state before block i + 1.
_COUNT_OUTPUTS = ("sglang", "specforge", "torchspec", "modelopt", "trtllm")
_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(slots=True)
class Imported:
    """The kind of the head, how it was read, and what to look at."""

    kind: str
    read_as: str
    warnings: list[str] = field(default_factory=list)


def import_head(
    source: str | Path,
    out: str | Path,
    kind: str = "auto",
    *,
    target: str | None = None,
    taps: tuple[int, ...] | None = None,
    rope_theta: float | None = None,
    norm_output: bool | None = None,
    overwrite: bool = False,
) -> Imported:
    """Write the head in the folder `source` natively to `out`; every tensor stays as it is stored.

    kind: who wrote it, or `auto`. target: its target, recorded in headsmith.json, and needed where
    the checkpoint borrows its lm_head. taps (states before blocks), rope_theta and norm_output
    stand in for what its config says.

    Raises HeadsmithError for a checkpoint that cannot be read, one that leaves open what is meant,
    and one that does not fit the target.
    """
    source, out = Path(source), Path(out)
    if out.resolve() == source.resolve():
        raise HeadsmithError(f"{out} is the checkpoint itself; give another folder with --out")
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
        raise HeadsmithError(f"{out} is there already; give another --out, or --overwrite")
    raw = read_json(source / "config.json")
    read_as = detect(raw) if kind == "auto" else kind
    done = Imported("", read_as)
    given = None if target is None else Target.load(target)
    head: Head
    if is_original(raw):
        head = read_original(source, raw, given)
        dtype = next(head.parameters()).dtype
    elif raw.get("model_type") == MODEL_TYPE:
        dtype = stored_dtype(read_tensors(source))
        head = MedusaHead.load(source, dtype=dtype)
    else:
        dtype = stored_dtype(read_tensors(source))
        config = adapted(raw, read_as, taps, rope_theta, norm_output, done.warnings)
        layers = _blocks(raw, given)
        head = Eagle3Head.load(source, num_target_layers=layers, dtype=dtype, config_json=config)
    done.kind = head.kind
    with atomic_folder(out) as folder:
        head.save(folder, dtype)
        if given is not None:
            done.warnings += check_pair(given, folder)
        write_json(folder / FILE, _provenance(source, folder, head, read_as, given))
    return done


def detect(raw: dict[str, Any]) -> str:
    """Who wrote a checkpoint, as far as its config.json tells."""
    if "speculators_config" in raw or "speculators_model_type" in raw:
        return "speculators"
    if is_original(raw):
        return "medusa"
    return "native"


def adapted(
    raw: dict[str, Any],
    read_as: str,
    taps: tuple[int, ...] | None,
    rope_theta: float | None,
    norm_output: bool | None,
    warnings: list[str],
) -> dict[str, Any]:
    """The config.json with taps in vLLM's numbering at the top level, and what was given instead.

    Appends to `warnings` what is worth a look.
    """
    config = dict(raw)
    found = taps or _taps(raw, read_as)
    if found is not None:
        config[_KEY] = list(found)
    if rope_theta is not None:
        config = _with_theta(config, rope_theta)
    if norm_output is not None:
        config["norm_output"] = norm_output
        nested = dict(config.get("eagle_config") or {})
        nested.pop("return_hidden_post_norm", None)
        config["eagle_config"] = nested
    elif read_as == "specforge" and raw.get("norm_output"):
        raise HeadsmithError(
            "its config.json says norm_output: true, which SpecForge read in two ways: before its "
            "PR #879 (September 2026) the head was trained without it, then give --no-norm-output; "
            "after it with it, then give --norm-output"
        )
    if read_as == "eagle" and "rope_theta" not in raw and rope_theta is None:
        warnings.append("no rope_theta in its config.json: 10000, which the original code takes")
    return config


def _taps(raw: dict[str, Any], read_as: str) -> list[int] | None:
    """Taps in vLLM's numbering; None where the config names none, which means the default ones."""
    nested = (raw.get("eagle_config") or {}).get(_KEY)
    top = raw.get(_KEY)
    if top is not None and nested is not None:
        # Both numberings, as for vLLM and SGLang at once, or the same ids twice.
        if list(nested) not in ([tap - 1 for tap in top], list(top)):
            raise HeadsmithError(
                f"its config.json names taps {top} and, in eagle_config, {nested}: no two "
                "numberings of the same; give --taps"
            )
        return list(top) if list(nested) != list(top) else _counted(top, read_as)
    if top is not None:
        return _counted(top, read_as)
    if nested is None:
        return None
    if read_as == "native":
        before = ",".join(map(str, nested))
        after = ",".join(str(i + 1) for i in nested)
        raise HeadsmithError(
            f"its config.json names layers {before} in eagle_config alone, which vLLM reads as "
            f"taps {before} and SGLang as {after}; say who wrote it with --from, or give --taps"
        )
    return _counted(nested, read_as)


def _counted(ids: list[int], read_as: str) -> list[int]:
    return [i + 1 for i in ids] if read_as in _COUNT_OUTPUTS else list(ids)


def _with_theta(config: dict[str, Any], theta: float) -> dict[str, Any]:
    """The config with another RoPE base, in whatever spelling it has."""
    name = "transformer_layer_config"
    if name in config:
        return config | {name: _with_theta(dict(config[name]), theta)}
    if config.get("rope_parameters"):
        return config | {"rope_parameters": {**config["rope_parameters"], "rope_theta": theta}}
    return config | {"rope_theta": theta}


def _blocks(raw: dict[str, Any], target: Target | None) -> int | None:
    """How many blocks the target has, if it is given, or lies where the checkpoint says."""
    if target is not None:
        return target.num_layers
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    return target_config(verifier.get("name_or_path")).get("num_hidden_layers")


def _provenance(
    source: Path, folder: Path, head: Head, read_as: str, target: Target | None
) -> dict[str, Any]:
    about: dict[str, Any] = {"schema": "headsmith.head/1", "headsmith": __version__}
    if target is not None:
        about["target"] = target_info(target)
    about["head"] = {**head.about(), "sha256": weights_sha256(folder)}
    about["imported"] = {
        "from": source.name,
        "read_as": read_as,
        "sha256": weights_sha256(source),
    }
    return about
