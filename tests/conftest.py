"""What all tests share: few threads, no network, and the real things that some of them need."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# Before torch is imported. Tests are many small operations, which more threads only slow down; and
# threads of several workers would wait for each other: ten times slower on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Before Triton is imported: its kernels run on the CPU, in Triton's interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """The embedded default target (or `$HEADSMITH_TEST_TARGET`), converted; skips if absent."""
    from headsmith.models import embedded

    given = os.environ.get("HEADSMITH_TEST_TARGET")
    folder = Path(given) if given else embedded.folder_of(embedded.DEFAULT)
    if not (folder / "config.json").is_file():
        pytest.skip(f"no target in {folder}: run `make target` or set HEADSMITH_TEST_TARGET")
    return folder


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference heads and prompts beside the repository (or `$HEADSMITH_SHARED`)."""
    folder = Path(os.environ.get("HEADSMITH_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no reference data in {folder}: set HEADSMITH_SHARED")
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch with a single thread, as training by several processes has it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """write(name, text) makes a file in `tmp_path`, whose folder must be there."""

    def make(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A tokenizer whose tokens are bytes, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def tiny_llama(seed: int, **changes: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**sizes | changes))


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Any]:
    """make_llama(seed, **config): a random model, of H 32 and two query heads a key head."""
    return tiny_llama


@pytest.fixture(scope="session")
def tiny_target_dir(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 8 blocks and 300 ids, with a byte tokenizer."""
    path = tmp_path_factory.mktemp("target")
    model = tiny_llama(
        seed=7,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        vocab_size=300,
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
    )
    model.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def mutant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ModuleType, str, str], ModuleType]:
    """mutant(module, old, new): the module with one piece of its source replaced."""

    def make(module: ModuleType, old: str, new: str) -> ModuleType:
        source = Path(module.__file__ or "").read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the source"
        path = tmp_path / "mutant.py"
        path.write_text(source.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("mutant", path)
        assert spec is not None and spec.loader is not None
        wrong = importlib.util.module_from_spec(spec)
        # Where dataclasses look up what their module imports.
        monkeypatch.setitem(sys.modules, "mutant", wrong)
        spec.loader.exec_module(wrong)
        return wrong

    return make
