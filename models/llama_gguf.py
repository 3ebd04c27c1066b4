"""Convert a GGUF file of the Llama family to a float32 safetensors folder.

The files written are the ones that `transformers` would save after loading the GGUF file, byte for
byte, in a third of the time: its own loader parses the 50,000-entry vocabulary twice and builds a
name table of every architecture for every module. Other architectures go through `transformers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headsmith.errors import HeadsmithError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import LlamaConfig

# GGUF tensor name -> transformers name; `blk.N.` becomes `model.layers.N.`.
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, tokenizer, chat template and float32 weights of `gguf_file` into `folder`.

    Raises HeadsmithError if the file is not a GGUF file of the Llama architecture.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file
    from transformers import GenerationConfig

    try:
        reader = GGUFReader(gguf_file)
    except (ValueError, IndexError) as error:
        raise HeadsmithError(
            f"{gguf_file} is not a complete GGUF file ({error}); fetch it again"
        ) from error
    config = _config(reader, gguf_file)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    save_file(_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(gguf_file, folder)


def _config(reader: GGUFReader, gguf_file: Path) -> LlamaConfig:
    from transformers import LlamaConfig

    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    architecture = field("general.architecture")
    if architecture != "llama":
        raise HeadsmithError(
            f"{gguf_file} holds the architecture {architecture!r}, not llama; load it directly"
        )
    heads = field("llama.attention.head_count")
    hidden = field("llama.embedding_length")
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field("llama.vocab_size") or len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=hidden,
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("llama.attention.head_count_kv", heads),
        head_dim=field("llama.rope.dimension_count", hidden // heads),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("llama.context_length"),
        rope_parameters={
            "rope_theta": field("llama.rope.freq_base", 10000.0),
            "rope_type": "default",
        },
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        unk_token_id=field("tokenizer.ggml.unknown_token_id"),
        dtype="float32",
    )
    config._model_name_or_path = field("general.name", "")
    return config


def _weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, np.ndarray]:
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            value = _to_half_split(value, config.num_attention_heads)
        elif ".attn_k." in tensor.name:
            value = _to_half_split(value, config.num_key_value_heads)
        weights[_name(tensor.name)] = np.ascontiguousarray(value, dtype=np.float32)
    return weights


def _name(gguf_name: str) -> str:
    if gguf_name in _WHOLE:
        return _WHOLE[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, suffix = rest.partition(".")
    if prefix != "blk" or part not in _BLOCK:
        raise HeadsmithError(f"the GGUF file has a tensor {gguf_name} that Llama has not")
    return f"model.layers.{layer}.{_BLOCK[part]}.{suffix}"


def _to_half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection, from llama.cpp's interleaved rotary pairs to half-split ones.

    `weight` is [heads * head_dim, hidden]; pair i lies in rows (2i, 2i+1) there, (i, i + d/2) here.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _save_tokenizer(gguf_file: Path, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # AutoTokenizer would parse the whole file once more, only to learn the class.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name
        )
    finally:
        logging.set_verbosity(verbosity)
    tokenizer.save_pretrained(folder)
