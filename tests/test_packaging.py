"""The folders at the root really are the package: nothing missing, nothing shadowed, no leaks."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("train", "models", "inference", "data", "recipes")
# Folders of data whose generator scripts lie beside it, in the repository but not in the wheel.
SCRIPTS = ("data/quickstart",)
MAX_LINES = 300


def pyproject() -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        tomllib = pytest.importorskip("tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def python_files() -> list[Path]:
    """Every Python file of the repository, without following the links inside headsmith/."""
    folders = (*ROOMS, "headsmith", "tests", "benchmarks")
    found: list[Path] = []
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT).parts
            if inside[0] != "headsmith" or inside[1] not in ROOMS:
                found.append(path)
    return sorted(found)


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_packages_are_the_folders_with_an_init_file() -> None:
    on_disk = {"headsmith"}
    for room in ROOMS:
        for init in (ROOT / room).rglob("__init__.py"):
            on_disk.add(".".join(("headsmith", *init.parent.relative_to(ROOT).parts)))
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(on_disk)


def test_every_folder_with_code_has_an_init_file() -> None:
    for path in python_files():
        if path.relative_to(ROOT).parts[0] in ROOMS and short(path.parent) not in SCRIPTS:
            assert (path.parent / "__init__.py").is_file(), short(path)


def test_no_file_shadows_the_standard_library_or_a_dependency() -> None:
    # A file launched by path puts its folder first on sys.path, and its neighbours with it.
    needed = {line.split(";")[0] for line in requires("headsmith") or ()}
    names = {"".join(c if c.isalnum() or c in "-_." else " " for c in n).split()[0] for n in needed}
    wanted = {name.lower().replace("_", "-") for name in names}
    imports = {
        module
        for module, distributions in packages_distributions().items()
        if wanted & {name.lower().replace("_", "-") for name in distributions}
    }
    assert {"torch", "yaml", "click"} <= imports
    taken = set(sys.stdlib_module_names) | imports - {"headsmith"}
    rooms = [path for path in python_files() if path.relative_to(ROOT).parts[0] in ROOMS]
    assert [short(path) for path in rooms if path.stem in taken] == []


def test_every_file_says_what_it_is_and_stays_short() -> None:
    files = python_files()
    assert len(files) > 10
    bare = [short(p) for p in files if not ast.get_docstring(ast.parse(p.read_text("utf-8")))]
    assert bare == []
    lines = {short(path): len(path.read_text("utf-8").splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_inference_and_models_never_import_upwards() -> None:
    banned = {
        "headsmith.models": ("headsmith.inference", "headsmith.train", "headsmith.data"),
        "headsmith.inference": ("headsmith.train", "headsmith.data"),
        "headsmith.data": ("headsmith.train", "headsmith.inference"),
    }
    for path in python_files():
        room = "headsmith." + path.relative_to(ROOT).parts[0]
        for module in imported_modules(path):
            assert not module.startswith(banned.get(room, ("\0",))), f"{short(path)}: {module}"


def imported_modules(path: Path) -> list[str]:
    modules = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{short(path)}: relative import"
            modules.append(node.module)
    return modules


def test_public_names() -> None:
    import headsmith

    assert headsmith.__all__ == sorted(headsmith.__all__)
    assert set(headsmith._LAZY) < set(headsmith.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = headsmith.Nonsense


@pytest.mark.slow
def test_the_public_names_load() -> None:
    import headsmith

    assert all(isinstance(getattr(headsmith, name), type) for name in headsmith._LAZY)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_rooms(tmp_path: Path) -> None:
    pytest.importorskip("build")
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    if not any(tracked):
        pytest.skip("not a git checkout")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    # With the links of `make links` in place: they must not get into the wheel.
    (source / "headsmith" / "data").symlink_to(source / "data")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout

    with zipfile.ZipFile(next(tmp_path.glob("headsmith-*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    shipped = {name for name in filter(None, tracked) if belongs_in_the_wheel(name)}
    expected = {name if name.startswith("headsmith/") else f"headsmith/{name}" for name in shipped}
    assert names == expected
    assert "headsmith/py.typed" in names


def belongs_in_the_wheel(name: str) -> bool:
    room = name.partition("/")[0]
    if name.endswith(".py"):
        return room in (*ROOMS, "headsmith") and not name.startswith(SCRIPTS)
    if name.endswith(".j2"):
        return room == "inference"
    return name == "headsmith/py.typed" or (
        name.endswith((".yaml", ".json") if room == "recipes" else ".jsonl")
        and room in ("recipes", "data")
    )
