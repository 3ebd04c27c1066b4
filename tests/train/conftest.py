"""Conversations to train a head on, and a recipe that does."""

import json
import random
from pathlib import Path

import pytest

WORDS = "one two three red green blue tea milk sun moon sea hill".split()


def write_conversations(path: Path, count: int, seed: int = 0) -> Path:
    chooser = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(count):
            turns = []
            for _ in range(chooser.randint(1, 2)):
                for role in ("user", "assistant"):
                    text = " ".join(chooser.choices(WORDS, k=chooser.randint(3, 12)))
                    turns.append({"role": role, "content": text})
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.fixture(scope="session")
def target_dir(tiny_target_dir: Path) -> Path:
    """Training is tested on a tiny random target."""
    return tiny_target_dir


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl", 40)


@pytest.fixture
def recipe_file(tmp_path: Path, target_dir: Path, conversations: Path) -> Path:
    """A recipe that trains a tiny head in about fifty quick steps."""
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"""
target: {{path: {target_dir}}}
head: {{draft_vocab_size: 64}}
data:
  source: {conversations}
  max_length: 128
  row_tokens: 256
  prepared_dir: {tmp_path / "prepared"}
train:
  tokens_per_step: 512
  epochs: 4
  unroll_steps: 3
  learning_rate: 2.0e-3
validation: {{holdout: 0.2, limit: 4, max_new_tokens: 12, draft: "chain:3"}}
output: {{dir: {tmp_path / "out"}, save_every: 10}}
"""
    )
    return path
