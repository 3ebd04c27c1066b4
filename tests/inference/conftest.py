"""A tiny random target in float64, prompts, its own plain answers, and drafters for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from headsmith.inference.drafters import Update
from headsmith.inference.engine import Decoder
from headsmith.inference.records import Request, Response
from headsmith.inference.tree import DynamicTree, Shape, Tree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

VOCAB = 96


@pytest.fixture(scope="session")
def small_target(tiny_tokenizer: Any, make_llama: Callable[..., LlamaForCausalLM]) -> Target:
    """4 blocks, H 32, 96 ids, no stop id: its text wanders and never ends by itself."""
    model = make_llama(
        seed=11,
        num_hidden_layers=4,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    target = Target(model.double(), tiny_tokenizer, "small")
    # The tokenizer's own end of sequence lies beyond the 96 ids.
    assert all(i >= VOCAB for i in target.stop_ids)
    return target


@pytest.fixture(scope="session")
def requests() -> list[Request]:
    """Five prompts of 1 to 17 tokens."""
    generator = torch.Generator().manual_seed(2)
    lengths = [3, 17, 1, 8, 5]
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [Request(f"r{i}", "task", ids) for i, ids in enumerate(prompts)]


@pytest.fixture(scope="session")
def plain(small_target: Target) -> Callable[..., list[Response]]:
    """plain(requests, **Decoder arguments): decoding without a drafter."""

    def decode(requests: list[Request], **arguments: Any) -> list[Response]:
        decoder = Decoder(small_target, batch=len(requests), **arguments)
        return decoder.generate(requests)[0]

    return decode


@pytest.fixture(scope="session")
def answers(requests: list[Request], plain: Callable[..., list[Response]]) -> dict[str, list[int]]:
    """What the target says to each prompt, 40 tokens of it, by request id."""
    return {r.request.id: r.output_ids for r in plain(requests, max_new_tokens=40)}


@pytest.fixture(scope="session")
def head(small_target: Target) -> Eagle3Head:
    """A fresh EAGLE-3.1 head; it drafts every second id."""
    vocabulary = torch.arange(0, small_target.vocab_size, 2)
    return Eagle3Head.for_target(
        small_target, vocabulary, taps=(1, 2, 4), fc_norm=True, norm_output=True
    )


def check_accounts(response: Response) -> None:
    """Identities that hold for every response, whatever drafted it."""
    passes, length = response.passes, len(response.output_ids)
    assert sum(p.committed for p in passes) == length - 1
    for p in passes:
        assert 0 <= p.accepted <= p.proposed <= p.nodes
        assert 1 <= p.committed <= p.accepted + 1
    # Only the last pass can be cut.
    assert all(p.committed == p.accepted + 1 for p in passes[:-1])
    assert len(response.token_times) == length
    assert response.token_times == sorted(response.token_times)
    assert response.prefill_s == response.token_times[0]


@pytest.fixture(scope="session")
def decode(small_target: Target) -> Callable[..., list[Response]]:
    """decode(drafter, requests, target=small_target, **Decoder arguments), accounts checked."""

    def run(
        drafter: Any, requests: list[Request], target: Target = small_target, **arguments: Any
    ) -> list[Response]:
        responses, phases = Decoder(target, drafter, **arguments).generate(requests)
        assert [r.request for r in responses] == requests
        for response in responses:
            check_accounts(response)
        assert min(phases.prefill_s, phases.draft_s, phases.verify_s, phases.other_s) >= 0
        return responses

    return run


@pytest.fixture(scope="session")
def same_text(
    requests: list[Request],
    plain: Callable[..., list[Response]],
    decode: Callable[..., list[Response]],
) -> Callable[..., list[Response]]:
    """same_text(drafter, batch, **Decoder arguments): responses, their text the plain one."""

    def run(drafter: Any, batch: int, **arguments: Any) -> list[Response]:
        responses = decode(drafter, requests, batch=batch, **arguments)
        for got, own in zip(responses, plain(requests, **arguments), strict=True):
            assert (got.output_ids, got.finish_reason) == (own.output_ids, own.finish_reason)
        return responses

    return run


class Knowing:
    """Keeps what every slot committed and knows how the text goes on. Proposes `draft`'s tree.

    A text that it does not know is an error, or with `strict` off one whose end it does not know.
    """

    taps: tuple[int, ...] = (1, 3)
    strict = True

    def __init__(
        self, requests: Sequence[Request], answers: dict[str, list[int]], shape: Shape, vocab: int
    ) -> None:
        self.texts = [[*r.prompt_ids, *answers[r.id]] for r in requests]
        self.shape, self.vocab = shape, vocab
        self.committed: dict[int, list[int]] = {}
        self.resets: list[tuple[int, int]] = []

    def reset(self, slots: int, capacity: int) -> None:
        self.resets.append((slots, capacity))
        self.committed = {}

    def release(self, slot: int) -> None:
        self.committed.pop(slot, None)

    def propose(self, updates: Sequence[Update]) -> list[Tree]:
        assert len({u.slot for u in updates}) == len(updates)
        return [self.draft(u.tokens[-1], self._rest(u)) for u in updates]

    def _rest(self, update: Update) -> list[int]:
        """How the target will go on behind the tokens committed so far."""
        assert update.taps.shape[:2] == (len(update.tokens), len(self.taps))
        seen = self.committed.setdefault(update.slot, [])
        seen += update.tokens
        # Updates hold every token but the very first.
        known = [t for t in self.texts if t[1 : 1 + len(seen)] == seen]
        assert known or not self.strict, "not the target's text"
        return known[0][1 + len(seen) :] if known else []

    def draft(self, root: int, rest: list[int]) -> Tree:
        raise NotImplementedError


class Perfect(Knowing):
    """Right to the end of what it knows."""

    def draft(self, root: int, rest: list[int]) -> Tree:
        depth = self.shape.depth
        return Tree.chain([root, *(rest + [0] * depth)[:depth]])


class Adversarial(Knowing):
    """Never right."""

    def draft(self, root: int, rest: list[int]) -> Tree:
        right = (rest + [0] * self.shape.depth)[: self.shape.depth]
        return Tree.chain([root, *((t + 1) % self.vocab for t in right)])


class Scripted(Knowing):
    """Right for as many tokens as `counts` says, pass by pass and round again, then wrong."""

    counts: Sequence[int] = (0, 2, 1, 3)
    passes = 0

    def draft(self, root: int, rest: list[int]) -> Tree:
        depth = self.shape.depth
        right = self.counts[self.passes % len(self.counts)]
        self.passes += 1
        text = (rest + [0] * depth)[:depth]
        return Tree.chain(
            [root, *(t if i < right else (t + 1) % self.vocab for i, t in enumerate(text))]
        )


class RandomTrees(Knowing):
    """Trees of any form: the right tokens are in them somewhere, siblings may be equal."""

    def __init__(
        self,
        requests: Sequence[Request],
        answers: dict[str, list[int]],
        shape: DynamicTree,
        vocab: int,
        seed: int,
    ) -> None:
        super().__init__(requests, answers, shape, vocab)
        self.chooser = random.Random(seed)

    def draft(self, root: int, rest: list[int]) -> Tree:
        assert isinstance(self.shape, DynamicTree)
        tokens, parents, depths, right = [root], [-1], [0], [True]
        for _ in range(self.chooser.randint(0, self.shape.nodes)):
            parent = self.chooser.choice([i for i, d in enumerate(depths) if d < self.shape.depth])
            depth = depths[parent]
            known = right[parent] and depth < len(rest) and self.chooser.random() < 0.6
            token = rest[depth] if known else self.chooser.randrange(self.vocab)
            tokens.append(token)
            parents.append(parent)
            depths.append(depth + 1)
            right.append(right[parent] and depth < len(rest) and token == rest[depth])
        return Tree(tokens, parents)


@pytest.fixture(scope="session")
def knows(requests: list[Request]) -> Callable[[dict[str, list[int]]], SimpleNamespace]:
    """knows(answers by request id): .Perfect(shape), .Adversarial(shape), .Scripted(shape),
    .RandomTrees(shape, seed).
    """

    def make(kind: type[Knowing], answers: dict[str, list[int]]) -> Callable[..., Knowing]:
        return lambda shape, *rest: kind(requests, answers, shape, VOCAB, *rest)

    kinds = (Perfect, Adversarial, Scripted, RandomTrees)
    return lambda answers: SimpleNamespace(**{k.__name__: make(k, answers) for k in kinds})


@pytest.fixture(scope="session")
def knowing(
    knows: Callable[[dict[str, list[int]]], SimpleNamespace], answers: dict[str, list[int]]
) -> SimpleNamespace:
    """Drafters that know the target's greedy answers."""
    return knows(answers)
