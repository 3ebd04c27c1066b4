"""No drafter changes the text: greedy and sampled, alone and in ragged batches, chain and tree."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from headsmith.inference.accept import GREEDY, Accepted, Greedy, Rule, Sample
from headsmith.inference.drafter_choice import GivenText, Lookahead, Ngram
from headsmith.inference.drafters import Drafter
from headsmith.inference.engine import Decoder
from headsmith.inference.given_text import GivenTextDrafter
from headsmith.inference.lookahead import LookaheadDrafter
from headsmith.inference.ngram import NgramDrafter
from headsmith.inference.noise import Place
from headsmith.inference.records import Request, Response
from headsmith.inference.small_model import ModelDrafter
from headsmith.inference.tree import RankTree, Tree, parse_shape
from headsmith.models.target import Target

N = 20
# At this temperature the looping target leaves its loops now and then.
SAMPLE = Sample(0.02, seed=3)
STATIC = RankTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


# Weights so small that a model hardly looks back.
BLUNT = {
    "max_position_embeddings": 128,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def looping(make_llama: Callable[..., LlamaForCausalLM], tiny_tokenizer: Any) -> Target:
    """Two blocks that hardly look back: greedy text soon goes round, as lookup needs it."""
    model = make_llama(seed=5, num_hidden_layers=2, vocab_size=60, **BLUNT)
    return Target(model.double(), tiny_tokenizer, "looping")


@pytest.fixture(scope="module")
def cousin(
    make_llama: Callable[..., LlamaForCausalLM], tiny_tokenizer: Any, looping: Target
) -> Any:
    """A smaller model that agrees with the looping target on most tokens, and of fewer ids."""
    model = make_llama(seed=6, num_hidden_layers=1, vocab_size=58, **BLUNT).double()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(looping.model.get_input_embeddings().weight[:58])
        model.lm_head.weight.copy_(looping.head_weight[:58])
        model.lm_head.weight.add_(0.004 * torch.randn(58, 32, dtype=torch.float64))
    return Target(model, tiny_tokenizer, "cousin")


@pytest.fixture(scope="module")
def asked(requests: list[Request]) -> list[Request]:
    """The usual prompts in 60 ids, each with a given text for its own slot."""
    chooser = random.Random(1)
    return [
        replace(
            one,
            prompt_ids=[t % 60 for t in one.prompt_ids],
            given_ids=[chooser.randrange(60) for _ in range(30)],
        )
        for one in requests
    ]


def decoded(
    target: Target, drafter: Drafter | None, asked: list[Request], batch: int, rule: Rule
) -> list[Response]:
    decoder = Decoder(target, drafter, batch=batch, max_new_tokens=N, rule=rule)
    return decoder.generate(asked)[0]


@pytest.fixture(scope="module")
def plain(looping: Target, asked: list[Request]) -> Callable[[Rule], list[list[int]]]:
    """plain(rule): what every request gives without a drafter."""
    return cache(lambda rule: [r.output_ids for r in decoded(looping, None, asked, 1, rule)])


def mostly_right(asked: list[Request], outputs: list[list[int]]) -> list[Request]:
    """The requests, each with its own plain output as given text, every seventh token another."""
    return [
        replace(one, given_ids=[(t + 1) % 60 if i % 7 == 3 else t for i, t in enumerate(output)])
        for one, output in zip(asked, outputs, strict=True)
    ]


NAMES = [
    "ngram chain:4",
    "ngram tree:9,3,4",
    "lookahead",
    "lookahead prompt",
    "model chain:3",
    "model tree:9,3,3",
    "model static",
    "text chain:4",
    "text tree:9,3,4",
]


@pytest.fixture(scope="module")
def make(looping: Target, cousin: Target) -> Callable[[str], Drafter]:
    """make(name): a drafter for the looping target."""

    def of(name: str) -> Drafter:
        kind, _, draft = name.partition(" ")
        if kind == "lookahead":
            return LookaheadDrafter(Lookahead(4, 4, 3, from_prompt=draft == "prompt"))
        shape = STATIC if draft == "static" else parse_shape(draft)
        if kind == "ngram":
            return NgramDrafter(Ngram(1, 3), shape)
        if kind == "text":
            return GivenTextDrafter(GivenText(), shape)
        return ModelDrafter(cousin, looping, shape)

    return of


@pytest.mark.parametrize("rule", [GREEDY, SAMPLE], ids=["greedy", "sample"])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_that_of_plain_decoding(
    name: str,
    rule: Rule,
    make: Callable[[str], Drafter],
    looping: Target,
    asked: list[Request],
    plain: Callable[[Rule], list[list[int]]],
) -> None:
    expected, drafter = plain(rule), make(name)
    asked = mostly_right(asked, expected) if name.startswith("text") else asked
    alone = decoded(looping, drafter, asked, 1, rule)
    assert [r.output_ids for r in alone] == expected
    # More requests than slots, and slots that are used again: who shares a pass changes nothing.
    together = decoded(looping, drafter, asked, 4, rule)
    assert [r.output_ids for r in together] == expected
    assert [r.passes for r in together] == [r.passes for r in alone]
    accepted = {p.accepted for r in alone for p in r.passes}
    assert 0 in accepted and len(accepted) > 2, "passes differ in what they accept"


@dataclass(frozen=True, slots=True)
class _Gullible(Greedy):
    """The bug: the first draft that the target would not have written is kept too."""

    def accept(
        self, tree: Tree, logits: Tensor, choices: list[int], places: Sequence[Place]
    ) -> Accepted:
        path = Greedy().accept(tree, logits, choices, places).path
        path = [*path, *tree.children[path[-1]][:1]]
        return Accepted(path, choices[path[-1]])


@dataclass(frozen=True, slots=True)
class _Fresh(Sample):
    """The bug: a draw behind a draft has other noise than the same draw without one."""

    def accept(
        self, tree: Tree, logits: Tensor, choices: list[int], places: Sequence[Place]
    ) -> Accepted:
        again = [(choice + (len(tree) > 1)) % logits.shape[1] for choice in choices]
        return Sample(self.temperature, self.seed).accept(tree, logits, again, places)


@pytest.mark.parametrize(
    ("wrong", "rule"), [(_Gullible(), GREEDY), (_Fresh(0.02, 3), SAMPLE)], ids=["greedy", "sample"]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_that_keeps_the_wrong_tokens_is_found(
    name: str,
    wrong: Rule,
    rule: Rule,
    make: Callable[[str], Drafter],
    looping: Target,
    asked: list[Request],
    plain: Callable[[Rule], list[list[int]]],
) -> None:
    """The comparison above, with a decoder that has a bug: no drafter hides it."""
    for batch in (1, 4):
        got = decoded(looping, make(name), asked, batch, wrong)
        assert [r.output_ids for r in got] != plain(rule)
