"""The committed prompt sets: well formed, the size we state, and disjoint from each other."""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "data"
TRAINING = DATA / "quickstart" / "prompts.jsonl"
EVALUATION = DATA / "prompts" / "default.jsonl"
MAX_SHARED_4_GRAMS = 0.6


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def user_turns(row: dict[str, Any]) -> list[str]:
    if "turns" in row:
        return row["turns"]
    return [message["content"] for message in row["messages"]]


def fold(text: str) -> str:
    return " ".join(text.casefold().split())


def four_grams(text: str) -> set[tuple[str, ...]]:
    words = fold(text).split()
    return {tuple(words[start : start + 4]) for start in range(len(words) - 3)}


@pytest.fixture(scope="module")
def training() -> list[dict[str, Any]]:
    return read_rows(TRAINING)


@pytest.fixture(scope="module")
def evaluation() -> list[dict[str, Any]]:
    return read_rows(EVALUATION)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = DATA / "quickstart" / "make_prompts.py"
    spec = importlib.util.spec_from_file_location("make_prompts", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclass(slots=True) looks its own module up.
    sys.modules["make_prompts"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", [TRAINING, EVALUATION], ids=["training", "evaluation"])
def test_ids_are_unique_and_turns_are_clean_text(path: Path) -> None:
    rows = read_rows(path)
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        turns = user_turns(row)
        assert 1 <= len(turns) <= 2, row["id"]
        assert all(turn and turn == turn.strip() for turn in turns), row["id"]


def test_training_counts(training: list[dict[str, Any]]) -> None:
    counts = Counter(row["id"].split("-")[0] for row in training)
    assert counts == {"chat": 480, "code": 300, "maths": 260, "summary": 280, "extraction": 280}
    assert sum("turns" in row for row in training) == 193


def test_training_row_has_messages_or_two_turns(training: list[dict[str, Any]]) -> None:
    for row in training:
        if "turns" in row:
            assert set(row) == {"id", "turns"} and len(row["turns"]) == 2
        else:
            assert set(row) == {"id", "messages"}
            assert [message["role"] for message in row["messages"]] == ["user"]


def test_training_prompts_are_distinct_and_short(training: list[dict[str, Any]]) -> None:
    first = [user_turns(row)[0] for row in training]
    lengths = sorted(len(text.split()) for text in first)
    assert len({fold(text) for text in first}) == len(first)
    assert lengths[-1] <= 110
    assert lengths[len(lengths) * 8 // 10] < 40


def test_training_variety(generator: ModuleType) -> None:
    for category in generator.QUOTAS:
        blocks = generator.read_blocks(generator.BANK / f"{category}.txt").values()
        wordings = sum(len(block.requests) for block in blocks)
        assert wordings + (category == "maths") * sum(len(block.items) for block in blocks) >= 25
        assert len({item for block in blocks for item in block.items}) >= 50


def test_evaluation_counts(evaluation: list[dict[str, Any]]) -> None:
    tasks = ("chat", "code", "maths", "summary", "extraction")
    assert Counter(row["task"] for row in evaluation) == dict.fromkeys(tasks, 12)
    assert sum(len(row["turns"]) == 2 for row in evaluation) >= 12
    for row in evaluation:
        assert set(row) == {"id", "task", "turns"}
        assert row["id"].rsplit("-", 1)[0] == row["task"]


def test_no_evaluation_turn_is_a_training_turn(
    training: list[dict[str, Any]], evaluation: list[dict[str, Any]]
) -> None:
    seen = {fold(turn) for row in training for turn in user_turns(row)}
    turns = [turn for row in evaluation for turn in row["turns"]]
    assert len({fold(turn) for turn in turns}) == len(turns)
    assert [turn for turn in turns if fold(turn) in seen] == []


def test_evaluation_prompts_share_few_4_grams_with_training(
    training: list[dict[str, Any]], evaluation: list[dict[str, Any]]
) -> None:
    known = [four_grams(turn) for row in training for turn in user_turns(row)]
    for row in evaluation:
        for turn in row["turns"]:
            grams = four_grams(turn)
            worst = max(len(grams & other) for other in known)
            assert worst <= MAX_SHARED_4_GRAMS * len(grams), turn


def test_generator_reproduces_the_committed_file(generator: ModuleType) -> None:
    assert generator.make_prompts().encode() == TRAINING.read_bytes()


def test_another_seed_gives_another_file(generator: ModuleType) -> None:
    assert generator.make_prompts(seed=1).encode() != TRAINING.read_bytes()


def test_a_stray_bank_line_is_named(generator: ModuleType, tmp_path: Path) -> None:
    bank = tmp_path / "bad.txt"
    bank.write_text("== a\n? Say {x}\nhello\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.txt:3: a line starts with"):
        generator.read_blocks(bank)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a=3-3 b=4-4] {a} and {b}", "3 and 4"),
        ("[a=3-3 b=4-4] {a*b} {a+b} {a+b*a}", "12 7 15"),
        ("{7-7} {only/only}", "7 only"),
        ("no slots", "no slots"),
    ],
)
def test_slots(generator: ModuleType, text: str, expected: str) -> None:
    assert generator.Filler(generator.random.Random(0), {}).fill(text) == expected


def test_a_pool_word_stays_the_same_within_a_prompt(generator: ModuleType) -> None:
    pools = {"name": generator.Block(items=["Ann", "Bo"])}
    filled = generator.Filler(generator.random.Random(0), pools).fill("{name} {name2} {name}")
    first, second, third = filled.split()
    assert first == third and {first, second} == {"Ann", "Bo"}


def test_literal_items_keep_their_braces(generator: ModuleType) -> None:
    filler = generator.Filler(generator.random.Random(0), {})
    assert generator.fill_prompt("run {x}", "d = {1-2}", True, filler) == "Run d = {1-2}"
