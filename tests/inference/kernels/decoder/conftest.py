"""The whole decoder on a tiny target: every drafter with every rule, by the references and by the
kernels, and both compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from headsmith.inference import engine
from headsmith.inference.accept import Greedy, Rule, Sample, Typical
from headsmith.inference.active import Active
from headsmith.inference.cache import KeyValueCache
from headsmith.inference.drafter_choice import GivenText, Lookahead, Ngram
from headsmith.inference.drafters import Drafter, Update
from headsmith.inference.engine import Decoder
from headsmith.inference.given_text import GivenTextDrafter
from headsmith.inference.lookahead import LookaheadDrafter
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.ngram import NgramDrafter
from headsmith.inference.ratio import Ratio
from headsmith.inference.records import Request, Response
from headsmith.inference.resident.rounds import DeviceRounds
from headsmith.inference.sampling import Shaping
from headsmith.inference.small_model import ModelDrafter
from headsmith.inference.tree import Branches, Chain, Draft, DynamicTree, RankTree, Tree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.target import Target

# So few ids that drafts are right by chance, and a tree whose frontiers have different parents.
VOCAB, NEW = 12, 4
CHAIN, TREE, BRANCHES = Chain(3), DynamicTree(7, 2, 4), Branches((2, 1))
STATIC = RankTree(((0,), (1,), (0, 0), (0, 1)))
RULES: dict[str, Rule] = {
    "greedy": Greedy(),
    "sample": Sample(0.8, seed=3),
    "ratio": Ratio(0.8, seed=3),
    "typical": Typical(0.8, threshold=0.3),
}
SHAPED: dict[str, Rule] = {
    "penalties": Greedy(Shaping(bias=((3, 1.0), (7, -2.0)), repetition=1.3, presence=0.4)),
    "cuts": Sample(0.9, 2, Shaping(repetition=1.2, top_k=6, top_p=0.9, min_p=0.02)),
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


def stirred(head: Any) -> Any:
    """As if trained: a fresh head's norms change no order, and fresh Medusa heads are all alike."""
    generator = torch.Generator().manual_seed(8)
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return head


def eagle(shape: Draft, *kernels: str, **flags: bool) -> Kind:
    def make(target: Target, small: Target, rule: Rule) -> Drafter:
        # It drafts three ids of four.
        ids = torch.tensor([i for i in range(VOCAB) if i % 4])
        head = Eagle3Head.for_target(target, ids, taps=(0, 1), **flags)
        return make_drafter(stirred(head), target, shape, rule)

    return Kind(make, frozenset({"head input", *kernels}))


def medusa(lm_head: Any, shape: Draft, *kernels: str) -> Kind:
    def make(target: Target, small: Target, rule: Rule) -> Drafter:
        ids = torch.arange(0, VOCAB, 2) if lm_head == "truncated" else None
        head = MedusaHead.for_target(target, ids, num_heads=3, lm_head=lm_head)
        return make_drafter(stirred(head), target, shape, rule)

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every drafter with every rule; each drafter meets one request and three in turn."""
    cases = [
        (rule, kind, (1, 3)[(i + j) % 2])
        for i, rule in enumerate(RULES)
        for j, kind in enumerate(DRAWN if rule == "ratio" else KINDS)
    ]
    if "count" in metafunc.fixturenames:
        metafunc.parametrize(("rule", "kind", "count"), cases)


@dataclass
class Decoded:
    """Answers, all trees that were drafted for them, the kernels that ran and those that should."""

    responses: list[Response]
    drafts: list[Tree]
    kernels: set[str]
    due: set[str]


def decode(
    models: tuple[Target, ...], kind: str, name: str, requests: list[Request], **options: Any
) -> Decoded:
    rule = {**RULES, **SHAPED}[name]
    made = (DRAWN if name == "ratio" else KINDS)[kind]
    drafter = made.make(*models, rule)
    drafts: list[Tree] = []
    if drafter is not None:
        propose = drafter.propose

        def recorded(updates: Sequence[Update]) -> list[Tree]:
            trees = propose(updates)
            drafts.extend(trees)
            return trees

        drafter.propose = recorded  # type: ignore[method-assign]
    options = {"batch": len(requests), "max_new_tokens": NEW, **options}
    decoder = Decoder(models[0], drafter, rule=rule, **options)
    # Of the module that the decoder's rounds come from, which may be a wrong one.
    rounds = engine.rounds_for.__globals__["DeviceRounds"]
    draft = rounds.draft

    def seen(self: DeviceRounds, active: Sequence[Active]) -> None:
        draft(self, active)
        assert self._bucket is not None
        tree = self._bucket.state.tree
        rows = zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        if drafter is not None:
            drafts.extend(Tree(*row) for row in list(rows)[: len(active)])

    due = {"tree attention"} | made.kernels
    if name != "ratio":
        due |= {"verify"}
    if name == "greedy":
        due |= {"lm_head"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "draft", seen)
        responses = decoder.generate(requests)[0]
    return Decoded(responses, drafts, decoder.kernels, due)


def counts(responses: list[Response]) -> list[list[tuple[int, int, int, int]]]:
    return [
        [(p.proposed, p.accepted, p.committed, p.nodes) for p in one.passes] for one in responses
    ]


def unwritten(cache: KeyValueCache, like: Tensor) -> Tensor:
    """A store whose rows are NaN until they are written."""
    groups, _, d = like.shape
    return like.new_full((cache.slots, groups, cache.capacity, d), float("nan"))


@pytest.fixture
def same_with_kernels(
    models: tuple[Target, ...], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Decoded]:
    """same_with_kernels(kind, rule, requests, rounds="host", **Decoder arguments): what decoding by
    kernels gave, once its texts, counts and drafts are found to be those of the references.
    """

    def run(*case: Any, rounds: str = "host", **options: Any) -> Decoded:
        monkeypatch.setenv("HEADSMITH_KERNELS", "off")
        monkeypatch.setenv("HEADSMITH_ROUNDS", rounds)
        plain = decode(models, *case, **options)
        assert plain.kernels == set()
        with monkeypatch.context() as patch:
            patch.setenv("HEADSMITH_KERNELS", "on")
            patch.setattr(KeyValueCache, "_empty", unwritten)
            found = decode(models, *case, **options)
        for mine, own in zip(found.responses, plain.responses, strict=True):
            assert (mine.output_ids, mine.finish_reason) == (own.output_ids, own.finish_reason)
        assert counts(found.responses) == counts(plain.responses)
        for tree, other in zip(found.drafts, plain.drafts, strict=True):
            assert (tree.tokens, list(tree.parents)) == (other.tokens, list(other.parents))
        return found

    return run


@pytest.fixture
def caught(
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[ModuleType, str, str], ModuleType],
    same_with_kernels: Callable[..., Decoded],
) -> Callable[..., None]:
    """caught((module, old, new), taken_by, kind, rule, **options): with that piece of a module of
    headsmith.inference replaced, what `taken_by` names there is the wrong one, and decoding shows.
    """

    def run(wrong: tuple[str, str, str], taken_by: str, *case: str, **options: Any) -> None:
        module, old, new = wrong
        made = mutant(import_module(f"headsmith.inference.{module}"), old, new)
        name = f"headsmith.inference.{taken_by}"
        monkeypatch.setattr(name, getattr(made, taken_by.rpartition(".")[2]))
        # Two at a time, so that the third joins in the middle.
        with pytest.raises(AssertionError):
            same_with_kernels(*case, requests, batch=2, **{"max_new_tokens": 5, **options})

    return run
