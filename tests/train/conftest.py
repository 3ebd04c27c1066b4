"""A tiny random target with a byte tokenizer, and conversations to train a head on."""

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "one two three red green blue tea milk sun moon sea hill".split()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; ChatML around the turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = TEMPLATE
    return fast


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
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


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
