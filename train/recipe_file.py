"""The YAML of a recipe as a tree, and `key.sub=value` written into it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from headsmith.errors import HeadsmithError


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"key {twice!r} is given twice in the mapping at line {line}")
        return super().construct_mapping(node, deep)


def read_tree(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise HeadsmithError(f"{path} cannot be read as YAML: {reason}") from None
    if not isinstance(tree, dict):
        raise HeadsmithError(f"{path} is not a recipe: it holds no sections like target: and data:")
    return tree


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """Write each `key.sub=value` into `tree`, the value read as YAML."""
    applied = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key or not all(key.split(".")):
            raise HeadsmithError(f"override {override!r} is not of the form key.sub=value")
        try:
            value = yaml.load(text, _StrictLoader)
        except yaml.YAMLError:
            raise HeadsmithError(f"the value in override {override!r} is not YAML") from None
        *parents, last = key.split(".")
        section = tree
        for parent in parents:
            if section.get(parent) is None:
                section[parent] = {}
            section = section[parent]
            if not isinstance(section, dict):
                raise HeadsmithError(f"override {override!r}: {parent} is a value, not a section")
        section[last] = value
        applied.append((key, value))
    return applied
