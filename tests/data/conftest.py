"""Small tokenizers with the shapes of chat templates that are in use, and a source writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
SPECIALS = [
    *("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>"),
    *("<|end_header_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>"),
    *("<|system|>", "<|end|>", "<|endoftext|>"),
]
CORPUS = [
    "Hello world, this is a small corpus. The assistant answers the user's question: 2 + 2 = 4.",
    "def add(a, b):\n    return a + b\n\nUser and system and model and assistant and 12345 67890.",
    "Thinking about it, the answer is yes.\n\nNo? Well, maybe; the sky is blue and grass is green.",
]


@cache
def _bytes_tokenizer(trimmed: bool) -> str:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trimmed)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


@cache
def _pieces_tokenizer() -> str:
    """Like SentencePiece: white space is part of the next piece, rare characters become bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " ")]
    )
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=[*SPECIALS, *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    # As special tokens the bytes would be found in text; as plain pieces they are the fallback.
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in bytes_]
    return json.dumps(state)


def build_tokenizer(template: str | None, eos: str = "</s>", kind: str = "bytes") -> Any:
    state = _pieces_tokenizer() if kind == "pieces" else _bytes_tokenizer(kind == "trimmed")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(state),
        bos_token="<s>",
        eos_token=eos,
        additional_special_tokens=SPECIALS[3:],
    )
    if template is not None:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """make_tokenizer(template name or None, eos="</s>", kind="bytes" | "trimmed" | "pieces")."""
    return build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_tokenizer("chatml", eos="<|im_end|>")


@pytest.fixture
def write_source(tmp_path: Path) -> Callable[..., Path]:
    """write_source([messages, ...], name="data.json") writes a JSON array of `messages` rows."""

    def write(conversations: list[Any], name: str = "data.json") -> Path:
        path = tmp_path / name
        rows = [{"messages": messages} for messages in conversations]
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def chat() -> Callable[..., list[dict[str, str]]]:
    """chat("question", "answer", ...) alternates user and assistant."""

    def make(*contents: str) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]

    return make
