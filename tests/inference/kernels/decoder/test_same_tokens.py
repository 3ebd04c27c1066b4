"""With kernels: the tokens and the drafts of the reference path, for every drafter and rule, one
request and three ragged ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headsmith.inference.head_reading import merged
from headsmith.inference.records import Request
from headsmith.models.target import Target


@pytest.mark.slow
def test_the_tokens_of_the_references(
    rule: str, kind: str, count: int, requests: list[Request], same_with_kernels: Any
) -> None:
    found = same_with_kernels(kind, rule, requests[:count])
    assert all(len(r.output_ids) == 4 for r in found.responses)
    # Rows move only where a tree was accepted off its first path.
    assert found.kernels - {"compaction"} == found.due


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "penalties": ("penalties", {}),
    "cuts": ("cuts", {}),
    "stop id": ("greedy", {"max_new_tokens": 9}),
    "stop string": ("greedy", {"max_new_tokens": 9, "stop_strings": ['"&']}),
    "context": ("greedy", {"max_new_tokens": 20}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_and_ends(
    name: str,
    models: tuple[Target, ...],
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    same_with_kernels: Any,
) -> None:
    rule, options = SETTINGS[name]
    if name == "stop id":
        monkeypatch.setitem(models[0].__dict__, "stop_ids", (1, 9))
    kind = "ngram tree" if name == "context" else "eagle3 tree"
    some = requests[2:] if name == "context" else requests[:2]
    found = same_with_kernels(kind, rule, some, **options).responses
    reasons = {"stop id": "eos", "stop string": "stop", "context": "context"}
    assert reasons.get(name, "length") in {r.finish_reason for r in found}


def test_rows_of_different_passes_stay_apart() -> None:
    first, second = torch.zeros(3, 1, 2), torch.zeros(2, 1, 2)
    found = merged([(first, [1, 2]), (first, [0]), (second, None), (first, [1])])
    assert [taps is second for taps, _ in found] == [False, True, False]
    assert [rows for _, rows in found] == [[1, 2, 0], [0, 1], [1]]
