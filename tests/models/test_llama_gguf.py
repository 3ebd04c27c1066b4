"""Converting a GGUF file gives what transformers gives, tensor for tensor and file for file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants

from headsmith.errors import HeadsmithError
from headsmith.models import llama_gguf

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96
TOKENS = ["<|a|>", "<|b|>", "<|c|>", "a", "b", "Ġ", "ab", "Ġa"]


def write_gguf(path: Path, *, tied: bool, architecture: str = "llama") -> None:
    """A tiny random Llama with Q4_1 matrices, a byte-level vocabulary and a chat template."""
    writer = GGUFWriter(path, architecture)
    writer.add_name("Tiny Llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 5)
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        value = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            kind = GGMLQuantizationType.Q4_1
            writer.add_tensor(name, quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)

    add("token_embd.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", HIDDEN)
    if not tied:
        add("output.weight", len(TOKENS), HIDDEN)
    kv = KV_HEADS * HIDDEN // HEADS
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        add(f"{block}.attn_norm.weight", HIDDEN)
        add(f"{block}.ffn_norm.weight", HIDDEN)
        add(f"{block}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"{block}.attn_k.weight", kv, HIDDEN)
        add(f"{block}.attn_v.weight", kv, HIDDEN)
        add(f"{block}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"{block}.ffn_gate.weight", INNER, HIDDEN)
        add(f"{block}.ffn_up.weight", INNER, HIDDEN)
        add(f"{block}.ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_is_what_transformers_loads(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf, tied=tied)
    folder = tmp_path / "converted"
    folder.mkdir()
    llama_gguf.convert(gguf, folder)

    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=gguf.name, dtype=torch.float32
    )
    expected = theirs.state_dict()
    actual = ours.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    ids = torch.arange(len(TOKENS))[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    for name in ("rope_parameters", "rms_norm_eps", "eos_token_id", "tie_word_embeddings"):
        assert getattr(ours.config, name) == getattr(theirs.config, name), name

    expected_tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.backend_tokenizer.to_str() == expected_tokenizer.backend_tokenizer.to_str()
    assert tokenizer.chat_template == expected_tokenizer.chat_template
    assert tokenizer.eos_token == "<|c|>"


def test_other_architectures_and_broken_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    write_gguf(other, tied=True, architecture="gpt2")
    with pytest.raises(HeadsmithError, match="architecture 'gpt2', not llama"):
        llama_gguf.convert(other, tmp_path)

    cut = tmp_path / "cut.gguf"
    cut.write_bytes(other.read_bytes()[:300])
    with pytest.raises(HeadsmithError, match="not a complete GGUF file"):
        llama_gguf.convert(cut, tmp_path)

    text = tmp_path / "text.gguf"
    text.write_text("this is not a model at all, but a text of some length")
    with pytest.raises(HeadsmithError, match="not a complete GGUF file"):
        llama_gguf.convert(text, tmp_path)
