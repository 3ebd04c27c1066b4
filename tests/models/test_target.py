"""The target: taps, packed documents, logits, identity, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headsmith.errors import HeadsmithError
from headsmith.models.spans import Span
from headsmith.models.target import Target

Write = Callable[..., Path]
Make = Callable[..., PreTrainedModel]


def some_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def target(write_target: Write, make_model: Make) -> Target:
    return Target.load(write_target(make_model("llama")))


@pytest.mark.parametrize("family", ["llama-tied", "gemma2", "granite", "cohere2"])
def test_logits_of_some_ids_are_those_columns(
    family: str, write_target: Write, make_model: Make
) -> None:
    target = Target.load(write_target(make_model(family)))
    last, ids = torch.randn(5, 32), torch.tensor([0, 3, 3, 269, 17])
    expected = target.logits(last)[:, ids]
    assert expected.dtype == torch.float32
    torch.testing.assert_close(target.logits_of(last, ids), expected, rtol=1e-4, atol=1e-5)


def test_sharded_folder_is_the_same_target(write_target: Write, make_model: Make) -> None:
    model = make_model("llama")
    whole = write_target(model, "whole")
    sharded = write_target(model, "sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    first, second = Target.load(whole), Target.load(sharded)
    assert first.fingerprint() == second.fingerprint()
    ids = some_ids(6)
    torch.testing.assert_close(
        first.features(ids, [6], (2,)).last, second.features(ids, [6], (2,)).last, rtol=0, atol=0
    )


def test_sizes_and_embeddings(target: Target) -> None:
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (6, 32, 270)
    assert target.max_context == 128
    assert target.dtype == torch.float32 and target.device.type == "cpu"
    ids = some_ids(4)
    assert torch.equal(target.embed(ids), target.model.get_input_embeddings().weight[ids])
    assert not any(p.requires_grad for p in target.model.parameters())


def test_float64_stays_float64(write_target: Write, make_model: Make) -> None:
    target = Target.load(write_target(make_model("llama")), dtype=torch.float64)
    last = target.features(some_ids(3), [3], ()).last
    assert last.dtype == torch.float64 and target.logits(last).dtype == torch.float64


def test_default_taps(write_target: Write, make_model: Make) -> None:
    deep = Target.load(write_target(make_model("llama", num_hidden_layers=9)))
    assert deep.default_taps() == (2, 4, 6)


@pytest.mark.parametrize("layers", [1, 2, 4, 5, 6])
def test_default_taps_that_collide_are_refused(
    layers: int, write_target: Write, make_model: Make
) -> None:
    target = Target.load(write_target(make_model("llama", num_hidden_layers=layers)))
    with pytest.raises(HeadsmithError, match=rf"{layers} blocks has no three default taps"):
        target.default_taps()


@pytest.mark.parametrize("tap", [-1, 7])
def test_a_tap_outside_the_target_is_refused(target: Target, tap: int) -> None:
    with pytest.raises(HeadsmithError, match=rf"tap {tap} is outside 0..6"):
        target.features(some_ids(3), [3], (tap,))


def test_taps_leave_no_hook_behind(target: Target) -> None:
    def hooks() -> list[int]:
        return [len(b._forward_pre_hooks) + len(b._forward_hooks) for b in target._blocks]

    before = hooks()
    with pytest.raises(HeadsmithError):
        target.features(some_ids(3), [3], (1, 99))
    target.features(some_ids(3), [3], (1, 6))
    assert hooks() == before


def test_positions_follow_the_span(target: Target) -> None:
    """Without a cache, a later start only turns the rotary angles: the same states, as RoPE is."""
    ids = some_ids(5)
    near, far = target.run(ids, [Span(5)]), target.run(ids, [Span(5, start=40)])
    torch.testing.assert_close(near.last, far.last, rtol=1e-3, atol=1e-4)


@pytest.fixture
def rounded(make_model: Make) -> PreTrainedModel:
    """A model whose weights are exact in bfloat16."""
    return make_model("llama").to(torch.bfloat16)


def test_fingerprint_does_not_depend_on_how_it_is_stored_or_loaded(
    rounded: PreTrainedModel, write_target: Write
) -> None:
    short = write_target(rounded, "bfloat16")
    long = write_target(copy.deepcopy(rounded).float(), "float32")
    prints = {
        Target.load(short).fingerprint(),
        Target.load(short, dtype=torch.bfloat16).fingerprint(),
        Target.load(long).fingerprint(),
        Target.load(long, dtype=torch.float64).fingerprint(),
    }
    assert len(prints) == 1
    assert prints.pop().startswith("sha256:")


def test_fingerprint_tells_targets_apart(
    rounded: PreTrainedModel, write_target: Write, tiny_tokenizer: Any
) -> None:
    other_weights = copy.deepcopy(rounded)
    with torch.no_grad():
        other_weights.lm_head.weight[3, 3] += 1
    other_rope = copy.deepcopy(rounded)
    other_rope.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    template = copy.deepcopy(tiny_tokenizer)
    template.chat_template = template.chat_template.replace("user", "User") + " "
    vocabulary = copy.deepcopy(tiny_tokenizer)
    vocabulary.add_tokens(["another"])
    folders = [
        write_target(rounded, "a"),
        write_target(other_weights, "b"),
        write_target(other_rope, "c"),
        write_target(rounded, "d", template),
        write_target(rounded, "e", vocabulary),
    ]
    assert len({Target.load(folder).fingerprint() for folder in folders}) == len(folders)


def test_fingerprint_is_not_changed_by_use(target: Target, write_target: Write) -> None:
    before = target.fingerprint()
    again = Target.load(target.path)
    again.tokenizer("some text", truncation=True, max_length=2)
    assert again.fingerprint() == before


def test_a_target_with_nan_is_refused(write_target: Write, make_model: Make) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(HeadsmithError, match="NaN"):
        Target.load(write_target(model))


def test_a_target_whose_logits_are_not_its_heads_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an unknown scale behind the output head would look like."""
    monkeypatch.setattr(Target, "logits", lambda self, last: 2 * last @ self.head_weight.T)
    with pytest.raises(HeadsmithError, match="output head on the last state"):
        target.check()


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        # Attention of its own, and a state that has no attention to keep documents apart with.
        ("falcon", {"num_attention_heads": 4}, "does not attend through transformers'"),
        ("mamba", {"state_size": 4, "num_hidden_layers": 4}, "cannot be a target"),
    ],
)
def test_architectures_that_cannot_keep_documents_apart_are_refused(
    kind: str, sizes: dict[str, int], said: str, write_target: Write
) -> None:
    given = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 270, **sizes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given))
    with pytest.raises(HeadsmithError, match=said):
        Target.load(write_target(model))


def test_stop_ids_are_those_that_generate_reads(write_target: Write, make_model: Make) -> None:
    model = make_model("llama", eos_token_id=[9, 4])
    assert Target.load(write_target(model, "config")).stop_ids == (4, 9)
    model.generation_config.eos_token_id = 7
    assert Target.load(write_target(model, "generation")).stop_ids == (7,)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    tokenizers_own = Target.load(write_target(model, "tokenizer"))
    assert tokenizers_own.stop_ids == (tokenizers_own.tokenizer.eos_token_id,)


def test_end_of_turn_is_always_drafted(
    write_target: Write, make_model: Make, tiny_tokenizer: Any
) -> None:
    """The template ends a turn with a special token that is not the end of the sequence."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens([AddedToken("<|eot|>", special=True)], special_tokens=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|eot|>")
    target = Target.load(write_target(make_model("llama", eos_token_id=[9, 4]), "t", tokenizer))
    turn_end = tokenizer.convert_tokens_to_ids("<|eot|>")
    assert target.always_drafted == tuple(sorted({4, 9, turn_end}))


def test_without_a_template_the_stop_ids_are_drafted(
    write_target: Write, make_model: Make, tiny_tokenizer: Any
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None
    # An id beyond the output head can not be drafted.
    target = Target.load(write_target(make_model("llama", eos_token_id=[9, 999]), "t", tokenizer))
    assert target.always_drafted == (9,)
