"""The bugs that users of other verifiers reported (docs/verifier-bugs.md): every entry names tests
that are there, or says why it cannot occur; what no other test shows is shown here.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest
import torch

from headsmith.cli import COMMANDS, cli
from headsmith.inference.accept import Rule, Sample
from headsmith.inference.drafters import EagleDrafter, Update
from headsmith.inference.engine import Decoder
from headsmith.inference.make_drafter import make_drafter
from headsmith.inference.metrics import equivalents, summarise
from headsmith.inference.noise import Place
from headsmith.inference.ratio import Ratio
from headsmith.inference.records import Request, Response
from headsmith.inference.sampling import Shaping
from headsmith.inference.tree import Branches, Chain, DynamicTree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.target import Target

Decode = Callable[..., list[Response]]
N = 14
ENTRIES = 35
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_entry_is_a_test_that_exists_or_a_reason(root: Path) -> None:
    rows = ROW.findall((root / "docs" / "verifier-bugs.md").read_text(encoding="utf-8"))
    assert [int(number) for number, _, _ in rows] == list(range(1, ENTRIES + 1))
    for number, _, answer in rows:
        named = TEST.findall(answer)
        assert named or "cannot occur" in answer, f"entry {number} names no test and no reason"
        # A name that the pattern misses would be checked by nobody.
        assert len(named) == answer.count("::"), f"entry {number} names a test in another form"
        for file, name in named:
            source = (root / file).read_text(encoding="utf-8")
            assert f"def {name}(" in source, f"entry {number}: {file} has no {name}"


def test_tokens_behind_the_end_are_in_no_figure(
    small_target: Target,
    knowing: SimpleNamespace,
    answers: dict[str, list[int]],
    requests: list[Request],
    decode: Decode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Entries 1 and 5: five tokens accepted at once, of which the second ends the answer."""
    answer = answers["r1"]
    end = next(i for i in range(1, 6) if answer.index(answer[i]) == i)
    monkeypatch.setitem(small_target.__dict__, "stop_ids", (answer[end],))
    (got,) = decode(knowing.Perfect(Chain(5)), requests[1:2], max_new_tokens=30)
    assert got.finish_reason == "eos" and len(got.output_ids) == end + 1
    assert [(p.accepted, p.committed) for p in got.passes] == [(5, end)]
    metrics = summarise([got])
    assert (metrics["tau"], metrics["tokens"], metrics["truncated"]["eos"]) == (end, end + 1, 1)
    # vLLM counts what was accepted, the end or not.
    assert equivalents([got])["vllm"] == 6.0


def test_a_head_made_for_a_shorter_context_drafts_beyond_it(
    small_target: Target, head: Eagle3Head, same_text: Decode
) -> None:
    """Entry 6: no table of rotary angles that ends where the head's training did."""
    short = copy.deepcopy(head)
    short = Eagle3Head(replace(head.config, max_position_embeddings=4), head.draft_ids)
    short.load_state_dict(head.state_dict())
    same_text(EagleDrafter(short, small_target, DynamicTree(9, 3, 4)), 3, max_new_tokens=N)


def test_a_head_in_bfloat16_hands_over_what_it_drew_from(
    small_target: Target, head: Eagle3Head, requests: list[Request]
) -> None:
    """Entry 21: one cast to float32, before temperature; q is those numbers, not a second softmax
    of half as many digits.
    """
    target = Target(copy.deepcopy(small_target.model).bfloat16(), small_target.tokenizer, "half")
    drafter = make_drafter(head, target, Branches((3, 1)), Ratio(0.7))
    prompt = requests[1].prompt_ids
    features = target.features(torch.tensor(prompt), [len(prompt)], head.taps)
    place = Place("a", len(prompt) + 1)
    drafter.reset(1, 40)
    (tree,) = drafter.propose([Update(0, [*prompt[1:], 7], features.taps, place=place)])
    assert tree.drawn is not None and tree.drawn.q.dtype == torch.float64
    torch.testing.assert_close(tree.drawn.q.sum(-1), torch.ones(4).double(), rtol=0, atol=1e-6)
    # In bfloat16 hardly any two of 48 probabilities would differ by less than a hundredth.
    assert not torch.equal(tree.drawn.q, tree.drawn.q.bfloat16().double())


def test_the_end_of_a_long_run_accepts_as_its_beginning(
    small_target: Target, head: Eagle3Head, requests: list[Request], decode: Decode
) -> None:
    """Entry 30: the same prompts again and again, in slots and caches that were used before."""
    drafter = EagleDrafter(head, small_target, DynamicTree(9, 3, 4))
    again = [replace(one, id=f"{round}/{one.id}") for round in range(12) for one in requests]
    got = decode(drafter, again, batch=3, max_new_tokens=N)
    first = [one.passes for one in got[: len(requests)]]
    for start in range(0, len(got), len(requests)):
        assert [one.passes for one in got[start : start + len(requests)]] == first


def commands(group: click.Command) -> Iterator[click.Command]:
    yield group
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            assert found is not None
            yield from commands(found)


def test_every_flag_can_be_turned_off() -> None:
    """Entry 34: no flag that is on by default and has no name for off."""
    seen = 0
    for command in commands(cli):
        for option in command.params:
            if isinstance(option, click.Option) and option.is_flag and option.default is True:
                seen += 1
                assert option.secondary_opts, f"{command.name} {option.name} cannot be turned off"
    assert seen and COMMANDS


@pytest.mark.parametrize("rule", [Sample(0.9, 5), Ratio(0.9, 5)], ids=str)
def test_only_the_seed_makes_the_text(
    rule: Rule, small_target: Target, head: Eagle3Head, requests: list[Request], decode: Decode
) -> None:
    """Entry 35: neither Python's, nor NumPy's, nor torch's own random state."""
    texts = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        drafter = make_drafter(head, small_target, Chain(3), rule)
        got = decode(drafter, requests, max_new_tokens=N, rule=rule)
        texts.append([one.output_ids for one in got])
    assert texts[0] == texts[1]


def test_a_setting_is_applied_or_refused(small_target: Target, requests: list[Request]) -> None:
    """Entries 18 and 19: each setting changes the plain text, so none is taken and dropped."""
    settings = [
        Shaping(top_k=2),
        Shaping(top_p=0.3),
        Shaping(min_p=0.5),
        Shaping(repetition=1.5),
        Shaping(presence=2.0),
        Shaping(frequency=2.0),
        Shaping(bias=((4, 9.0),)),
    ]
    texts = []
    for shaping in (Shaping(), *settings):
        rule = Sample(1.0, 5, shaping)
        decoder = Decoder(small_target, batch=5, max_new_tokens=N, rule=rule)
        texts.append(str([one.output_ids for one in decoder.generate(requests)[0]]))
    assert texts[0] not in texts[1:]
