"""A recipe: one YAML file that says everything about a training run. Reading one imports no torch.

    recipe = load_recipe("quickstart/eagle3", ["train.epochs=2", "output.dir=outputs/mine"])

Every default lives here and nowhere else, so a key that a recipe leaves out has the value below.
Mistakes become one sentence that names the file, the dotted key and what would have been right.
"""

import difflib
import hashlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headsmith.errors import HeadsmithError
from headsmith.models.eagle3_config import KINDS
from headsmith.train.applies import check_applies
from headsmith.train.head_sizes import HeadSizes
from headsmith.train.recipe_file import apply_overrides, read_tree

ROOMS = ("data", "inference", "models", "recipes", "train")


class Section(BaseModel):
    """A part of a recipe; a key that it does not know is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TargetSection(Section):
    """The frozen model: a folder, a GGUF file, a Hub id or an embedded name.

    `parallel` is for several processes: each holds the whole model, or the processes of a machine
    hold its blocks in shares. It decides no weight, so a run may go on with the other.
    """

    path: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    parallel: Literal["replicated", "sharded"] = "replicated"


class HeadSection(HeadSizes, Section):
    """The head to train. `draft_vocab_size: null` keeps every id of the target.

    `kind` sets its flags (`KINDS`): eagle3.1 is eagle3 with fc_norm and norm_output. A fresh EAGLE
    head begins as the best linear guess of `fit_rows` loss rows (null: ten for each input of the
    fit), or only with its matrices in balance (headsmith/train/begin.py). The keys from `num_heads`
    on are for Medusa heads; `loss: mix` is ce_weight x ce + the rest x kl. What does not apply to
    the kind is refused (headsmith/train/applies.py).
    """

    kind: Literal["eagle3", "eagle3.1", "medusa"] = "eagle3"
    taps: list[int] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    draft_vocab_size: int | None = Field(None, ge=1)
    init: Literal["linear", "balanced"] = "linear"
    fit_rows: int | None = Field(None, ge=1)
    init_from: str | None = None
    num_heads: int = Field(5, ge=1)
    num_layers: int = Field(1, ge=1)
    lm_head: Literal["shared", "private", "truncated"] = "shared"
    loss: Literal["ce", "kl", "mix"] = "kl"
    ce_weight: float = Field(0.5, ge=0, le=1)

    @model_validator(mode="after")
    def kind_sets_its_flags(self) -> "HeadSection":
        for flag in KINDS.get(self.kind, ()):
            if flag in self.model_fields_set and not getattr(self, flag):
                raise ValueError(f"kind {self.kind} is the one with {flag}; leave {flag} out")
            setattr(self, flag, True)
        return self


class DataSection(Section):
    """Conversations, and how they become packed rows of at most `row_tokens` tokens.

    `keep_features: memory` keeps the target's states of every row from the first epoch on, which
    saves the target's forward in the later ones; `--plan` says what it takes. `features` is a
    folder of `headsmith data capture`, whose states are read instead of running the target.
    """

    source: str
    split: str | None = None
    revision: str | None = None
    max_rows: int | None = Field(None, ge=1)
    max_length: int = Field(2048, ge=4)
    row_tokens: int = Field(2048, ge=4)
    keep_features: Literal["memory", "none"] = "none"
    features: str | None = None
    prepared_dir: str | None = None

    @model_validator(mode="after")
    def rows_hold_documents(self) -> "DataSection":
        if self.row_tokens < self.max_length:
            raise ValueError(
                f"row_tokens ({self.row_tokens}) is below max_length ({self.max_length}), so the "
                "longest conversation fits no row; raise row_tokens or lower max_length"
            )
        return self


class TrainSection(Section):
    """Optimisation. `max_steps` ends the run, and its schedule, early; null trains all epochs.

    `unroll_growth` is the share of the run in which the unroll grows from one step to all
    `unroll_steps`, in stages of equal length: the first draft is learned at the price of one step.
    `kl_scale` and `kl_decay` weigh the KL part of the acceptance-aware loss `lk`.
    """

    tokens_per_step: int = Field(4096, ge=1)
    epochs: int = Field(1, ge=1)
    max_steps: int | None = Field(None, ge=1)
    unroll_steps: int = Field(5, ge=1)
    unroll_growth: float = Field(0.0, ge=0, lt=1)
    step_decay: float = Field(0.8, gt=0, le=1)
    loss: Literal["kl", "lk"] = "kl"
    kl_scale: float = Field(1.0, ge=0)
    kl_decay: float = Field(3.0, ge=0)
    learning_rate: float = Field(1e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_ratio: float = Field(0.015, ge=0, le=1)
    clip: float = Field(0.5, gt=0)
    seed: int = Field(0, ge=0, lt=2**32)
    precision: Literal["float32", "bfloat16"] = "float32"


class ValidationSection(Section):
    """Held-out prompts for the verifier. It runs after each checkpoint and reports tau.

    `prompts` is a prompt file or task name. `holdout` leaves that share of the conversations out of
    training, and null `prompts` takes theirs; with `holdout: 0` too, nothing is validated.
    """

    prompts: str | None = None
    holdout: float = Field(0.0, ge=0, lt=1)
    limit: int = Field(16, ge=1)
    max_new_tokens: int = Field(64, ge=1)
    draft: str = "chain:4"
    times: int = Field(4, ge=1)


class OutputSection(Section):
    """Where the run writes. `save_every: null` saves `validation.times` times, evenly spread."""

    dir: str = "outputs/head"
    save_every: int | None = Field(None, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    project: str = "headsmith"


class Recipe(Section):
    """A whole run."""

    target: TargetSection
    head: HeadSection = HeadSection()
    data: DataSection
    train: TrainSection = TrainSection()
    validation: ValidationSection = ValidationSection()
    output: OutputSection = OutputSection()

    @model_validator(mode="after")
    def keys_apply(self) -> "Recipe":
        check_applies(self)
        return self

    @property
    def steps(self) -> int:
        """How many drafts ahead are trained: Medusa's heads, or the steps of the unroll."""
        return self.head.num_heads if self.head.kind == "medusa" else self.train.unroll_steps

    def fingerprint(self) -> str:
        """sha256 over what decides the weights; where and how often it is saved does not count."""
        apart: dict[str, Any] = {"output": True, "validation": True, "target": {"parallel"}}
        decides = self.model_dump(mode="json", exclude=apart)
        decides["holdout"] = self.validation.holdout
        text = json.dumps(decides, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in the file `name`, or packaged under that name, with `key.sub=value` applied.

    Raises HeadsmithError with one sentence for whatever is wrong with the file or an override.
    """
    path = recipe_path(name)
    tree = read_tree(path)
    from_command_line = {key for key, _ in apply_overrides(tree, overrides)}
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise HeadsmithError(_sentence(error, path, from_command_line)) from None


def recipe_path(name: str) -> Path:
    """The file of a recipe: a path, or the packaged `quickstart/eagle3` with or without `.yaml`."""
    packaged = _room("recipes")
    for candidate in (Path(name), Path(locate(name)), packaged / name, packaged / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    known = sorted(p.relative_to(packaged) for p in packaged.rglob("*.yaml"))
    names = ", ".join(str(p.with_suffix("")) for p in known if p.parts[0] != "accelerate")
    raise HeadsmithError(f"no recipe {name!r}: give a YAML file or a packaged name ({names})")


def locate(path: str) -> str:
    """`path` as it stands if it exists, else the packaged file of that name, else unchanged.

    Unchanged covers Hub ids and embedded names; whoever opens it says what is missing.
    """
    room, _, rest = path.partition("/")
    if Path(path).exists() or room not in ROOMS or not rest:
        return path
    packaged = _room(room) / rest
    return str(packaged) if packaged.exists() else path


def _room(name: str) -> Path:
    # find_spec on a subpackage imports only `headsmith`, so no torch comes along.
    spec = find_spec(f"headsmith.{name}")
    assert spec and spec.submodule_search_locations, f"headsmith.{name} is not installed"
    return Path(next(iter(spec.submodule_search_locations)))


def _sentence(error: ValidationError, path: Path, from_command_line: set[str]) -> str:
    """The first fault in words, unknown keys before wrong values: a misspelling causes both."""
    faults = error.errors(include_url=False)
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    names = [str(part) for part in fault["loc"]]
    key = ".".join(names)
    typed = any(f"{given}.".startswith(f"{key}.") for given in from_command_line)
    where = "command line" if typed else str(path)
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown key {key}{_nearest(names)}"
    if fault["type"] == "missing":
        return f"{where}: {key} is missing; a recipe must say it"
    if fault["type"] == "value_error":
        return ": ".join(filter(None, (where, key, str(fault["ctx"]["error"]))))
    given = json.dumps(fault["input"], default=str)
    given = given if len(given) <= 60 else given[:57] + "..."
    rule = fault["msg"].removeprefix("Input should be ")
    return f"{where}: {key} is {given}, but must be {rule}"


def _nearest(names: list[str]) -> str:
    """`; did you mean X?`, looked for first in the same section and then in the whole recipe."""
    known = _keys()
    key = ".".join(names)
    section = [k for k in known if k.rpartition(".")[0] == ".".join(names[:-1])]
    for pool in (section, known):
        lasts = {k.rpartition(".")[2]: k for k in reversed(pool)}
        close = difflib.get_close_matches(names[-1], lasts, n=1)
        if close:
            return f"; did you mean {lasts[close[0]]}?"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"; the nearest key is {close[0]}"


def _keys() -> list[str]:
    keys = []
    for name, field in Recipe.model_fields.items():
        section = next(t for t in (field.annotation, *get_args(field.annotation)) if t)
        assert isinstance(section, type) and issubclass(section, Section)
        keys += [name, *(f"{name}.{key}" for key in section.model_fields)]
    return keys
