"""The unroll grows from one step to all of them in stages of equal length."""

import pytest

from headsmith.train.recipe import TrainSection
from headsmith.train.step import steps_at


def test_stages() -> None:
    settings = TrainSection(unroll_steps=3, unroll_growth=0.5)
    assert [steps_at(s, 100, settings) for s in (0, 24, 25, 49, 50, 99)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    "settings", [{"unroll_steps": 4}, {"unroll_steps": 1, "unroll_growth": 0.5}]
)
def test_no_growth(settings: dict[str, float]) -> None:
    section = TrainSection(**settings)  # type: ignore[arg-type]
    assert {steps_at(s, 9, section) for s in range(9)} == {section.unroll_steps}
