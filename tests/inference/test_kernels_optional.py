"""Nothing in the package needs Triton to import: only the modules that hold or launch kernels do,
and those are imported where a kernel runs.
"""

from __future__ import annotations

import ast
from pathlib import Path

NEED_TRITON = ("_triton", "_launch")


def imported_at_once(path: Path) -> set[str]:
    """The modules that importing a file imports: those outside its functions."""
    found: set[str] = set()
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            found |= {f"{statement.module}.{alias.name}" for alias in statement.names}
            found.add(statement.module)
    return found


def needs_triton(module: str) -> bool:
    """Whether it is Triton's, or one of ours that holds or launches kernels."""
    parts = module.split(".")
    return parts[0] == "triton" or ("kernels" in parts and module.endswith(NEED_TRITON))


def test_only_kernels_import_triton(root: Path) -> None:
    rooms = ("data", "headsmith", "inference", "models", "train")
    files = sorted(path for room in rooms for path in (root / room).rglob("*.py"))
    kernels = [path for path in files if path.stem.endswith(NEED_TRITON)]
    assert len(kernels) > 4 and all(path.parent.name == "kernels" for path in kernels)
    assert any(needs_triton(module) for path in kernels for module in imported_at_once(path))
    for path in set(files) - set(kernels):
        assert [m for m in imported_at_once(path) if needs_triton(m)] == [], path
