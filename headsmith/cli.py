"""The `headsmith` command (see below for what it lists)."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
