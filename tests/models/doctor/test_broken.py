"""Broken checkpoints, one for each check: every one is caught with its sentence, and nothing else
is said of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headsmith.models.doctor.target import TargetFacts

Break = Callable[[Any], object]
IDS = "eagle_aux_hidden_state_layer_ids"


def drop(name: str) -> Break:
    return lambda patient: patient.tensors(lambda tensors: tensors.pop(name))


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    return lambda patient: patient.tensors(lambda t: t.update({name: make(t[name]).contiguous()}))


def cut(patient: Any) -> None:
    file = patient.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:3000])
    patient.record(remove=("head",))


def as_speculators(patient: Any) -> None:
    path = patient.folder / "config.json"
    body = json.loads(path.read_text())
    flags = {key: body.pop(key) for key in ("fc_norm", "norm_output", "draft_vocab_size")}
    outer = {"speculators_model_type": "eagle3", "transformer_layer_config": body}
    path.write_text(json.dumps(outer | flags))
    patient.record(head__norm_before_residual=True)


def flip(ids: torch.Tensor) -> torch.Tensor:
    changed = ids.clone()
    changed[[1, 7]] = changed[[7, 1]]
    return changed


# Of EAGLE-3.1: (check, how it is broken, level, sentence).
EAGLE: list[tuple[str, Break, str, str]] = [
    ("checkpoint", cut, "error", r"model.safetensors cannot be read .*; export it again"),
    ("checkpoint", drop("d2t"), "error", r"drafts \d+ of 300 ids but has no d2t; .*export it"),
    ("checkpoint", put("d2t", lambda d: d + 250), "error", r"d2t maps outside .*; export it again"),
    ("checkpoint", put("t2d", flip), "error", r"d2t and t2d name different ids.*; export it again"),
    ("tensors", drop("midlayer.self_attn.q_proj.weight"), "error", r"lacks .*q_proj.*; export it"),
    (
        "tensors",
        lambda p: p.config(fc_norm=False),
        "error",
        r"fc_norm.0.weight and 2 more.*set the",
    ),
    ("shapes", put("fc.weight", lambda w: w[:, :-64]), "error", r"fc.weight is \[64, 128\].*192"),
    ("finite", put("norm.weight", lambda w: w / 0), "error", r"norm.weight holds NaN or inf.*take"),
    ("trained", put("lm_head.weight", torch.zeros_like), "error", r"lm_head.weight is all zeros"),
    ("dtype", lambda p: p.config(torch_dtype="float16"), "warning", r"stored in float32 .*correct"),
    ("record", lambda p: p.record(head__sha256="0"), "error", r"weights are not those.*copy the"),
    ("record", lambda p: p.config(norm_output=False), "error", r"norm_output False .*with True; c"),
    ("keys", lambda p: p.config(hidden_size="64"), "error", r"hidden_size in .* wrong kind; corr"),
    ("keys", lambda p: p.config(**{IDS: "2"}), "error", r"layer_ids in config.json .* wrong kind"),
    ("keys", lambda p: p.config(eagle_config=[]), "error", r"eagle_config in .* of the wrong kind"),
    ("record", lambda p: p.record(target="me"), "error", r"target in headsmith.json is of the wr"),
    ("nulls", lambda p: p.config(target_hidden_size=None), "error", r"is null in .*; remove the"),
    ("tied", lambda p: p.config(tie_word_embeddings=True), "error", r"tie_word_embeddings.*false"),
    ("flags", lambda p: p.config(eagle_config={"norm_before_residual": True}), "error", r"move it"),
    (
        "flags",
        lambda p: p.config(eagle_config={"use_aux_hidden_state": False}),
        "error",
        r"vLLM drops fc .*; set it to true",
    ),
    ("flags", as_speculators, "warning", r"norm_before_residual is not in config.json.*; write"),
    ("taps", lambda p: p.config(**{IDS: [2, 4, 9]}), "error", r"taps \[2, 4, 9\] and .* 0..8; it"),
    ("taps", lambda p: p.taps([2, 4, 8]), "warning", r"tap 8, behind the last block"),
    (
        "taps",
        lambda p: p.config(eagle_config={IDS: [2, 4, 5]}),
        "warning",
        r"in eagle_config alone",
    ),
    (
        "taps",
        lambda p: p.config(**{IDS: [2, 4, 5]}, eagle_config={IDS: [2, 4, 5]}),
        "warning",
        r"which SGLang reads as \[3, 5, 6\]; write \[1, 3, 4\] there",
    ),
    (
        "window",
        lambda p: p.config(sliding_window=64, use_sliding_window=True),
        "warning",
        r"last 64 tokens only.*--specul",
    ),
    (
        "width",
        lambda p: p.config(target_hidden_size=128),
        "error",
        r"of width 128, .* give its own",
    ),
    ("identity", lambda p: p.config(vocab_size=301), "error", r"vocabulary of 301 ids, .*give its"),
    (
        "identity",
        lambda p: p.record(target__fingerprint="x", target__tokenizer="y"),
        "error",
        r"another tokenizer; give its own target",
    ),
    (
        "identity",
        lambda p: p.record(
            target__fingerprint="x", target__tokenizer="y", target__chat_template="z"
        ),
        "error",
        r"another chat template; give its own target",
    ),
    (
        "identity",
        lambda p: p.record(target__fingerprint="x", target__revision="v1"),
        "error",
        r"revision v1 where this is None; give its own target",
    ),
    ("rope", lambda p: p.config(rope_theta=5e5), "error", r"theta 500000 .* theta 10000 .*correct"),
    ("eps", lambda p: p.config(rms_norm_eps=1e-2), "warning", r"eps 0.01 and its target 1e-06"),
    ("context", lambda p: p.config(max_position_embeddings=64), "warning", r"64 positions .* 512"),
]


def caught(
    patient: Any, facts: TargetFacts | None, expected: tuple[str, str, str]
) -> list[tuple[str, str]]:
    """Level and check of what else is said; the expected must be there, in one line."""
    check, level, sentence = expected
    found = patient.findings(facts)
    mine = [one for one in found if (one.check, one.level) == (check, level)]
    assert [one for one in mine if re.search(sentence, one.sentence)], found
    assert all("\n" not in one.sentence and str(patient.folder) in one.sentence for one in found)
    return [(one.level, one.check) for one in found if one not in mine and one.level != "note"]


@pytest.mark.parametrize(("check", "harm", "level", "sentence"), EAGLE)
def test_eagle(
    eagle: Any, facts: TargetFacts, check: str, harm: Break, level: str, sentence: str
) -> None:
    assert [one.level for one in eagle.findings(facts)] == []
    harm(eagle)
    others = caught(eagle, facts, (check, level, sentence))
    assert not [one for one in others if one[0] == "error" and level == "warning"], others


def test_there_are_more_than_fifteen_kinds(eagle: Any, medusa: Any) -> None:
    sentences = {sentence for _, _, _, sentence in EAGLE}
    assert len(sentences) == len(EAGLE) >= 15
    assert len({check for check, _, _, _ in EAGLE}) >= 15


def test_most_need_no_target(eagle: Any, facts: TargetFacts) -> None:
    alone = [row for row in EAGLE if row[0] not in ("width", "identity", "rope", "eps", "context")]
    assert len(alone) >= 15
    eagle.tensors(lambda tensors: tensors.pop("fc.weight"))
    assert caught(eagle, None, ("tensors", "error", "lacks fc.weight")) == []


def test_what_ends_answers_must_be_drafted(eagle: Any, facts: TargetFacts) -> None:
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        kept = torch.arange(len(tensors["d2t"]))
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(300, dtype=torch.bool).index_fill_(0, kept, True)

    eagle.tensors(lose)
    assert (
        caught(eagle, facts, ("ends", "warning", "cannot draft <|im_end|>".replace("|", "."))) == []
    )


MEDUSA: list[tuple[str, Break, str]] = [
    ("keys", lambda p: p.config(num_attention_heads=4), r"num_attention_heads, which vLLM takes"),
    ("checkpoint", lambda p: p.config(remove=("hidden_size",)), r"has no hidden_size"),
    ("checkpoint", lambda p: p.config(medusa_fc_bias=False), r"does not say medusa_fc_bias"),
    ("tensors", drop("blocks.1.layers.0.weight"), r"lacks blocks.1.layers.0.weight"),
    ("lm_head", put("lm_head.weight", lambda w: w + 1), r"lm_head.weight is not that of the targ"),
]


@pytest.mark.parametrize(("check", "harm", "sentence"), MEDUSA)
def test_medusa(medusa: Any, facts: TargetFacts, check: str, harm: Break, sentence: str) -> None:
    assert medusa.findings(facts) == []
    harm(medusa)
    caught(medusa, facts, (check, "error", sentence))


def test_a_tree_deeper_than_the_heads(medusa: Any, facts: TargetFacts) -> None:
    tree = {"medusa_choices": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "accuracy": [[0.5]]}
    (medusa.folder / "medusa_tree.json").write_text(json.dumps(tree))
    assert (
        caught(medusa, facts, ("tree", "error", "goes 4 drafts deep and there are 3 heads")) == []
    )
    (medusa.folder / "medusa_tree.json").write_text("{}")
    assert caught(medusa, facts, ("tree", "error", "no medusa_choices .*; write it with")) == []
