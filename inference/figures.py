"""Figures as text: one way of writing each kind, a dash where there is none."""

from __future__ import annotations


def number(value: float | None, digits: int = 2) -> str:
    """`2.31`"""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """`81.5 %`"""
    return "-" if value is None else f"{100 * value:.1f} %"


def bounds(interval: list[float] | None) -> str:
    """`2.10 .. 2.52`"""
    return "-" if interval is None else f"{interval[0]:.2f} .. {interval[1]:.2f}"


def signed(value: float | None) -> str:
    """`+0.12`"""
    return "-" if value is None else f"{value:+.2f}"


def gigabytes(value: int | None) -> str:
    """`1.50`"""
    return "-" if value is None else f"{value / 1e9:.2f}"
