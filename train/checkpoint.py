"""The folder of a run: checkpoints that are whole or absent, the files a run owns, exact resume.

    output.dir/
      run.json             the recipe, and the names of all that this run wrote here
      metrics.jsonl        one line an optimiser step
      validation.jsonl     one line a validated checkpoint
      step-000123/         config.json, model.safetensors, headsmith.json, trainer.state
      latest, best         relative links to checkpoints; best has the highest tau

Only names that run.json lists are ever removed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.files import atomic_folder, weights_sha256, write_json, write_text
from headsmith.train.recipe import Recipe

SCHEMA = "headsmith.run/1"
# Not a name ending in .pt: what hashes or loads a head's weights must not take it for one.
STATE = "trainer.state"


@dataclass(slots=True)
class Run:
    """An output folder that one recipe owns. Only rank 0 writes.

    `inputs`: fingerprints of the target and the prepared data, which the recipe only names.
    """

    folder: Path
    recipe: Recipe
    inputs: dict[str, str]
    keep: int
    wrote: list[str] = field(default_factory=list)

    def checkpoints(self) -> list[Path]:
        """The run's checkpoints on disk, oldest first."""
        names = (name for name in self.wrote if name.startswith("step-"))
        return [self.folder / n for n in sorted(names) if (self.folder / n / STATE).is_file()]

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"step-{step:06}"

    def save(
        self, step: int, head: Any, state: Mapping[str, Any], about: Mapping[str, Any]
    ) -> Path:
        """Write checkpoint `step`: the head, its provenance `about` and the state to go on from.

        Raises EnvironmentFault if the disk is full; the earlier checkpoints are then untouched.
        """
        path = self.checkpoint(step)
        self.claim(path.name)
        with atomic_folder(path) as temporary:
            head.save(temporary)
            digest = weights_sha256(temporary)
            about = {**about, "head": {**about["head"], "sha256": digest}}
            write_json(temporary / "headsmith.json", about)
            torch.save(dict(state), temporary / STATE)
        self._link("latest", path)
        self._rotate()
        return path

    def load(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that can be read, and its state; None if there is none."""
        for path in reversed(self.checkpoints()):
            try:
                return path, torch.load(path / STATE, map_location="cpu", weights_only=True)
            except Exception:  # noqa: S112 - a damaged file fails in many ways; the one before it is as good
                continue
        return None

    def rewind(self, step: int) -> None:
        """Drop what was logged after `step`, so that going on writes no step twice.

        Also settles `latest` and `best`, in case a kill fell between a file and its link.
        """
        for name in ("metrics.jsonl", "validation.jsonl"):
            kept = [json.dumps(line) for line in self.read(name) if line["step"] <= step]
            write_text(self.folder / name, "".join(line + "\n" for line in kept))
        there = {int(path.name.removeprefix("step-")): path for path in self.checkpoints()}
        scored = [line for line in self.read("validation.jsonl") if line["step"] in there]
        if step in there:
            self._link("latest", there[step])
        if scored:
            best = max(scored, key=lambda line: (line["tau"] or 0.0, line["step"]))
            self._link("best", there[best["step"]])

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl or validation.jsonl."""
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a log; a line that a kill cut short is not one."""
        path = self.folder / name
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def validated(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Record the METRICS of checkpoint `step`; point `best` at it if its tau is the highest."""
        path = self.checkpoint(step)
        about = json.loads((path / "headsmith.json").read_text(encoding="utf-8"))
        write_json(path / "headsmith.json", {**about, "validation": dict(metrics)})
        earlier = [line["tau"] or 0.0 for line in self.read("validation.jsonl")]
        self.append("validation.jsonl", {"step": step, **metrics})
        if best := (metrics["tau"] or 0.0) >= max(earlier, default=0.0):
            self._link("best", path)
            self._rotate()
        return best

    def write_manifest(self) -> None:
        write_json(
            self.folder / "run.json",
            {
                "schema": SCHEMA,
                "fingerprint": self.recipe.fingerprint(),
                "inputs": self.inputs,
                "recipe": self.recipe.model_dump(mode="json"),
                "wrote": self.wrote,
            },
        )

    def claim(self, *names: str) -> None:
        """List names in run.json before they are written, so that no file of the run is unlisted.

        Raises HeadsmithError if something of that name is there that this run did not write.
        """
        new = [name for name in names if name not in self.wrote]
        for name in new:
            if os.path.lexists(self.folder / name):
                raise HeadsmithError(
                    f"{self.folder / name} is in the way and this run did not write it; move it or "
                    "choose another folder with output.dir=PATH"
                )
        if new:
            self.wrote += new
            self.write_manifest()

    def _link(self, name: str, path: Path) -> None:
        self.claim(name)
        temporary = self.folder / f".{name}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.name)
        os.replace(temporary, self.folder / name)

    def _rotate(self) -> None:
        """Remove the run's oldest checkpoints; the last `keep` and the best stay."""
        best = self.folder / "best"
        kept = {best.readlink().name} if "best" in self.wrote and best.is_symlink() else set()
        for path in self.checkpoints()[: -self.keep]:
            if path.name not in kept:
                _remove(path)
                self.wrote.remove(path.name)
        self.write_manifest()


def open_run(
    recipe: Recipe, inputs: dict[str, str], resume: bool | None = None, overwrite: bool = False
) -> Run:
    """The run in `recipe.output.dir`; for `inputs` see `Run`.

    A folder with this recipe's run is continued. Another recipe's run is refused, unless `resume`
    continues it all the same or `overwrite` removes it. With `resume=False` any run is refused.
    """
    folder = Path(recipe.output.dir)
    run = Run(folder, recipe, inputs, recipe.output.keep_checkpoints)
    old = _manifest(folder)
    if old is not None and overwrite:
        for name in old["wrote"]:
            _remove(folder / name)
        old = None
    if old is not None:
        run.wrote = list(old["wrote"])
        # Without a checkpoint there is nothing to continue and nothing to lose.
        if run.checkpoints():
            _check_same(old, run, resume)
    _sweep(folder, run.wrote)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if old is None:
            run.claim("run.json", "metrics.jsonl", "validation.jsonl")
        run.write_manifest()
    except OSError as error:
        raise EnvironmentFault(
            f"output.dir {folder} cannot be written ({error.strerror}); choose another folder with "
            "output.dir=PATH"
        ) from error
    return run


def join_run(recipe: Recipe, inputs: dict[str, str]) -> Run:
    """The run that rank 0 opened, for the other ranks."""
    run = Run(Path(recipe.output.dir), recipe, inputs, recipe.output.keep_checkpoints)
    run.wrote = list((_manifest(run.folder) or {"wrote": []})["wrote"])
    return run


def random_state() -> dict[str, Any]:
    """State of the generators of python, numpy and torch, in types that load without pickle."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` took; generators of devices that are gone are left alone."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / "run.json"
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise HeadsmithError(
            f"{path} was not written by headsmith; choose another folder with output.dir=PATH"
        )
    return manifest


def _check_same(old: Mapping[str, Any], run: Run, resume: bool | None) -> None:
    """Refuse to continue a run that is another one, or any run if `resume` is False."""
    same = old["fingerprint"] == run.recipe.fingerprint()
    changed = [name for name, value in run.inputs.items() if old["inputs"].get(name) != value]
    if resume or (same and not changed and resume is None):
        return
    if same:
        whose = "a run of this recipe"
        whose += f", but the {' and the '.join(changed)} behind it changed" if changed else ""
    else:
        whose = f"another recipe's run ({_difference(old['recipe'], run.recipe)})"
    raise HeadsmithError(
        f"{run.folder} holds {whose}; choose another folder with output.dir=PATH, continue it with "
        "--resume, or start over with --overwrite, which removes what that run wrote"
    )


def _difference(old: Mapping[str, Any], recipe: Recipe) -> str:
    """The first key of two recipes that differs and decides the weights."""
    for section, new in recipe.model_dump(mode="json", exclude={"output"}).items():
        for key, value in new.items():
            before = old.get(section, {}).get(key)
            decides = key == "holdout" if section == "validation" else key != "parallel"
            if before != value and decides:
                return f"{section}.{key} was {json.dumps(before)}, now {json.dumps(value)}"
    return "written by another version"


def _sweep(folder: Path, wrote: list[str]) -> None:
    """Remove the temporary siblings that a killed run left of the files it owns."""
    for name in wrote:
        for pattern in (f".{name}.*.tmp", f".{name}.*.old", f".{name}.tmp"):
            for path in folder.glob(pattern):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
