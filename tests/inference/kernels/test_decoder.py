"""The whole decoder with the kernels under the interpreter: the tokens of the reference path, for
every drafter and rule, one request and three ragged ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from headsmith.inference.accept import Greedy, Rule, Sample, Typical
from headsmith.inference.cache import KeyValueCache
from headsmith.inference.drafter_choice import GivenText, Lookahead, Ngram
from headsmith.inference.drafters import Drafter
from headsmith.inference.engine import Decoder
from headsmith.inference.given_text import GivenTextDrafter
from headsmith.inference.head_reading import merged
from headsmith.inference.lookahead import LookaheadDrafter
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.ngram import NgramDrafter
from headsmith.inference.ratio import Ratio
from headsmith.inference.records import Request, Response
from headsmith.inference.sampling import Shaping
from headsmith.inference.small_model import ModelDrafter
from headsmith.inference.tree import Branches, Chain, Draft, DynamicTree, RankTree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target

# So few ids that drafts are right by chance.
VOCAB, NEW = 12, 4
CHAIN, TREE, BRANCHES = Chain(2), DynamicTree(5, 2, 3), Branches((2, 1))
STATIC = RankTree(((0,), (1,), (0, 0), (0, 1)))
RULES: dict[str, Rule] = {
    "greedy": Greedy(),
    "sample": Sample(0.8, seed=3),
    "ratio": Ratio(0.8, seed=3),
    "typical": Typical(0.8, threshold=0.3),
}


@pytest.fixture(scope="module")
def models(tiny_tokenizer: Any, make_llama: Callable[..., LlamaForCausalLM]) -> tuple[Target, ...]:
    """A target in float32, groups of 2 heads, without a stop id, and a small model."""
    found = []
    for seed in (5, 6):
        model = make_llama(
            seed=seed,
            num_hidden_layers=1,
            vocab_size=VOCAB,
            max_position_embeddings=24,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
        )
        found.append(Target(model, tiny_tokenizer, "small"))
    return tuple(found)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (5, 3, 11)]
    given = torch.randint(VOCAB, (9,), generator=generator).tolist()
    return [Request(f"r{i}", "task", ids, given_ids=given) for i, ids in enumerate(prompts)]


@dataclass(frozen=True)
class Kind:
    """A drafter: what makes it, and the kernels of its own."""

    make: Callable[[Target, Target, Rule], Drafter | None]
    kernels: frozenset[str] = frozenset()


def eagle(shape: Draft, *kernels: str, **flags: bool) -> Kind:
    def make(target: Target, small: Target, rule: Rule) -> Drafter:
        # It drafts three ids of four.
        ids = torch.tensor([i for i in range(VOCAB) if i % 4])
        head = Eagle3Head.for_target(target, ids, taps=(0, 1), **flags)
        return make_drafter(head, target, shape, rule)

    return Kind(make, frozenset({"head input", *kernels}))


def medusa(lm_head: Any, shape: Draft, *kernels: str) -> Kind:
    def make(target: Target, small: Target, rule: Rule) -> Drafter:
        ids = torch.arange(0, VOCAB, 2) if lm_head == "truncated" else None
        head = MedusaHead.for_target(target, ids, num_heads=2, lm_head=lm_head)
        return make_drafter(head, target, shape, rule)

    return Kind(make, frozenset(kernels))


def small_model(shape: Draft, *kernels: str) -> Kind:
    return Kind(lambda target, small, rule: ModelDrafter(small, target, shape), frozenset(kernels))


def free(make: Callable[[], Drafter | None]) -> Kind:
    return Kind(lambda target, small, rule: make())


KINDS = {
    "none": free(lambda: None),
    "eagle3 chain": eagle(CHAIN, "lm_head"),
    "eagle3 tree": eagle(TREE, "lm_head", "tree build"),
    "eagle3 static": eagle(STATIC, "lm_head"),
    "eagle3.1 chain": eagle(CHAIN, "lm_head", fc_norm=True, norm_output=True),
    "eagle3.1 tree": eagle(TREE, "lm_head", "tree build", fc_norm=True, norm_output=True),
    "medusa shared": medusa("shared", STATIC, "lm_head"),
    "medusa private": medusa("private", STATIC, "lm_head"),
    "medusa truncated": medusa("truncated", CHAIN, "lm_head"),
    "ngram chain": free(partial(NgramDrafter, Ngram(1, 2), CHAIN)),
    "ngram tree": free(partial(NgramDrafter, Ngram(1, 2), TREE)),
    "lookahead": free(partial(LookaheadDrafter, Lookahead(2, 3, 2))),
    "given text": free(partial(GivenTextDrafter, GivenText(None), TREE)),
    "model chain": small_model(CHAIN, "lm_head"),
    "model tree": small_model(TREE, "lm_head", "tree build"),
    "model static": small_model(STATIC, "lm_head"),
}
# Rule ratio takes drafts that were drawn, which the host does.
DRAWN = {
    "eagle3 chain": eagle(CHAIN),
    "eagle3 branches": eagle(BRANCHES),
    "medusa shared": medusa("shared", CHAIN),
    "medusa branches": medusa("private", BRANCHES),
    "ngram chain": KINDS["ngram chain"],
    "model chain": KINDS["model chain"],
}


def decode(
    models: tuple[Target, ...], kind: Kind, rule: Rule, requests: list[Request], **options: Any
) -> tuple[list[Response], set[str]]:
    """Answers, and the kernels that ran."""
    drafter = kind.make(*models, rule)
    options = {"batch": len(requests), "max_new_tokens": NEW, **options}
    decoder = Decoder(models[0], drafter, rule=rule, **options)
    return decoder.generate(requests)[0], decoder.kernels


def counts(responses: list[Response]) -> list[list[tuple[int, int, int, int]]]:
    return [
        [(p.proposed, p.accepted, p.committed, p.nodes) for p in one.passes] for one in responses
    ]


def unwritten(cache: KeyValueCache, like: Tensor) -> Tensor:
    """A store whose rows are NaN until they are written."""
    groups, _, d = like.shape
    return like.new_full((cache.slots, groups, cache.capacity, d), float("nan"))


def same_with_kernels(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], tuple[list[Response], set[str]]]
) -> tuple[list[Response], set[str]]:
    """What the kernels gave, which is what the references give: texts and counts."""
    monkeypatch.setenv("HEADSMITH_KERNELS", "off")
    plain, none = run()
    assert none == set()
    with monkeypatch.context() as patch:
        patch.setenv("HEADSMITH_KERNELS", "on")
        patch.setattr(KeyValueCache, "_empty", unwritten)
        found, ran = run()
    assert [r.output_ids for r in found] == [r.output_ids for r in plain]
    assert [r.finish_reason for r in found] == [r.finish_reason for r in plain]
    assert counts(found) == counts(plain)
    return found, ran


# Every drafter with every rule; each drafter meets one request and three in turn.
CASES = [
    (rule, kind, (1, 3)[(i + j) % 2])
    for i, rule in enumerate(RULES)
    for j, kind in enumerate(DRAWN if rule == "ratio" else KINDS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "kind", "count"), CASES)
def test_the_tokens_of_the_references(
    rule: str,
    kind: str,
    count: int,
    models: tuple[Target, ...],
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = (DRAWN if rule == "ratio" else KINDS)[kind]
    run = partial(decode, models, made, RULES[rule], requests[:count])
    found, ran = same_with_kernels(monkeypatch, run)
    assert all(len(r.output_ids) == NEW for r in found)
    expected = {"tree attention"} | made.kernels
    if rule != "ratio":
        expected |= {"verify"}
    if rule == "greedy":
        expected |= {"lm_head"}
    # Rows move only where a tree was accepted off its first path.
    assert ran - {"compaction"} == expected


SHAPING = Shaping(bias=((3, 1.0), (7, -2.0)), repetition=1.3, presence=0.4)
SETTINGS: dict[str, tuple[Rule, dict[str, Any]]] = {
    "penalties": (Greedy(SHAPING), {}),
    "cuts": (Sample(0.9, 2, Shaping(repetition=1.2, top_k=6, top_p=0.9, min_p=0.02)), {}),
    "stop id": (Greedy(), {"max_new_tokens": 9}),
    "stop string": (Greedy(), {"max_new_tokens": 9, "stop_strings": ['"&']}),
    "context": (Greedy(), {"max_new_tokens": 20}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_and_ends(
    name: str,
    models: tuple[Target, ...],
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule, options = SETTINGS[name]
    if name == "stop id":
        monkeypatch.setitem(models[0].__dict__, "stop_ids", (1, 9))
    kind = KINDS["ngram tree"] if name == "context" else KINDS["eagle3 tree"]
    some = requests[2:] if name == "context" else requests[:2]
    run = partial(decode, models, kind, rule, some, **options)
    found, _ = same_with_kernels(monkeypatch, run)
    reasons = {"stop id": "eos", "stop string": "stop", "context": "context"}
    assert reasons.get(name, "length") in {r.finish_reason for r in found}


def test_rows_of_different_passes_stay_apart() -> None:
    first, second = torch.zeros(3, 1, 2), torch.zeros(2, 1, 2)
    found = merged([(first, [1, 2]), (first, [0]), (second, None), (first, [1])])
    assert [taps is second for taps, _ in found] == [False, True, False]
    assert [rows for _, rows in found] == [[1, 2, 0], [0, 1], [1]]


# What a module gives to whom.
GIVES = {
    "judging": "engine.Judge",
    "head_reading": "drafters.HeadReading",
}
WRONG = {
    "a tree from its second node on": ("judging", "[0, *accumulate", "[1, *accumulate"),
    "rows that pad a path": ("judging", "accepted + 1], rest[most", "accepted + 2], rest[most"),
    "one token too few": ("judging", "[len(a.output), a", "[len(a.output) + 1, a"),
    "noise of another place": ("judging", "numbers[place] for place", "0 for place", "sample"),
    "nothing cut off": ("judging", "kept == -math.inf", "kept != kept", "cuts"),
    "rejected nodes": ("head_reading", "else rows\n", "else [max(r - 1, 0) for r in rows]\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_wiring_is_caught(
    name: str,
    models: tuple[Target, ...],
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[ModuleType, str, str], ModuleType],
) -> None:
    module, old, new, *rules = WRONG[name]
    wrong = mutant(import_module(f"headsmith.inference.{module}"), old, new)
    attribute = GIVES[module].partition(".")[2]
    monkeypatch.setattr(f"headsmith.inference.{GIVES[module]}", getattr(wrong, attribute))
    rule = {**RULES, "cuts": SETTINGS["cuts"][0]}["".join(rules) or "greedy"]
    kind = "none" if rules else "eagle3 tree"
    # Two at a time, so that the third joins in the middle.
    run = partial(decode, models, KINDS[kind], rule, requests, batch=2, max_new_tokens=5)
    with pytest.raises(AssertionError):
        same_with_kernels(monkeypatch, run)
