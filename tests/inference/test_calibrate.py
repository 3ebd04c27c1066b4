"""Calibration: accuracies and walks by hand, and its promise against what the verifier measures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headsmith.cli import cli, run
from headsmith.errors import HeadsmithError
from headsmith.inference.calibrate import (
    MAX_RANKS,
    calibrate,
    choose_tree,
    conditional_accuracy,
    ranks_of,
    walk,
)
from headsmith.inference.engine import Decoder
from headsmith.inference.evaluate import quick_steps
from headsmith.inference.metrics import summarise
from headsmith.inference.rank_tree import build_tree
from headsmith.inference.records import Request
from headsmith.inference.tree import Calibrated, RankTree
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.medusa import MedusaHead
from headsmith.models.medusa_files import TREE_FILE, read_calibration
from headsmith.models.provenance import target_info
from headsmith.models.target import Target

K = 3
NO = MAX_RANKS


@pytest.fixture(scope="module")
def trained(small_target: Target, requests: list[Request]) -> MedusaHead:
    """Heads that learned a little of the target's text: often right, at different ranks."""
    responses, _ = Decoder(small_target, batch=5, max_new_tokens=40).generate(requests)
    states, labels = [], []
    for response in responses:
        ids = torch.tensor([*response.request.prompt_ids, *response.output_ids])
        last = small_target.features(ids, [len(ids)], ()).last.clone()
        states.append(last[: len(ids) - K - 1])
        labels.append(torch.stack([ids[2 + k : len(ids) - K + 1 + k] for k in range(K)]))
    x, y = torch.cat(states), torch.cat(labels, 1)
    head = MedusaHead.for_target(small_target, num_heads=K, lm_head="private").double()
    optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(6):
        optimiser.zero_grad()
        for k in range(K):
            logits = head.logits(k, head.state(k, x), small_target)
            torch.nn.functional.cross_entropy(logits, y[k]).backward()
        optimiser.step()
    return head.requires_grad_(False)


@pytest.mark.parametrize("nodes", [1, 6, 24])
def test_the_promise_is_what_the_verifier_measures(
    nodes: int, trained: MedusaHead, small_target: Target, requests: list[Request]
) -> None:
    found = calibrate(trained, small_target, requests, nodes=nodes, max_new_tokens=24, batch=5)
    trained.calibration = found
    metrics = summarise(quick_steps(small_target, trained, requests, Calibrated(), 24))
    assert metrics["tau"] is not None and metrics["tau"] > 1.1
    assert found.about["predicted_tau"] == pytest.approx(metrics["tau"], rel=0.05)
    assert found.about["passes"] == metrics["passes"]
    assert len(found.choices) <= nodes and found.about["prompts"] == 5
    # The tree earns its nodes: a chain of as many drafts, or of all heads, commits less.
    chain = RankTree.chain(min(nodes, K))
    least = summarise(quick_steps(small_target, trained, requests, chain, 24))["tau"]
    assert least is not None and metrics["tau"] >= least


def test_ranks_are_those_of_the_next_tokens_of_the_answer(
    trained: MedusaHead, small_target: Target, requests: list[Request]
) -> None:
    (response,), _ = Decoder(small_target, max_new_tokens=8).generate(requests[1:2])
    prompt, output = response.request.prompt_ids, response.output_ids
    ranks = ranks_of(trained, small_target, response)
    assert [len(place) for place in ranks] == [3, 3, 3, 3, 3, 2, 1]
    for j, place in enumerate(ranks):
        ids = torch.tensor([*prompt, *output[:j]])
        last = small_target.features(ids, [len(ids)], ()).last[-1:].clone()
        for k, rank in enumerate(place):
            logits = trained.logits(k, trained.state(k, last), small_target)[0]
            above = int((logits > logits[output[j + 1 + k]]).sum())
            assert rank == min(above, MAX_RANKS)


def test_walk_commits_accepted_drafts_and_one_more_to_the_end_of_the_answer() -> None:
    tree = RankTree(((0,), (1,), (0, 0), (0, 2)))
    # Right twice (0, 2), the bonus: places 0, 1, 2; then nothing; then (1,) and its end.
    answer = [(0, 2, NO), (5, 5, 5), (5, 5, 5), (2, 0, 0), (1, NO), (0,)]
    walked = walk([answer, []], tree)
    assert walked.starts == [answer[0], answer[3], answer[4]]
    assert walked.committed == 6 and walked.tau == 2.0


def test_accuracies_are_given_accepted_ancestors() -> None:
    places = [(0, 1, 0), (1, 0, 0), (2, 0, 0), (NO, 0, 0), (0, NO, 0)]
    free = conditional_accuracy(places, 3, frozenset())
    # Only where the first head's best was right is the second one looked at, and so on.
    assert free[0][:3] == [0.4, 0.2, 0.2]
    assert free[1][:3] == [0.0, 0.5, 0.0] and sum(free[2]) == 0.0
    given = conditional_accuracy(places, 3, frozenset({(0,), (1,), (0, 1)}))
    assert given[0] == free[0]
    assert given[1][:2] == [1 / 3, 1 / 3]
    # (0, 1) is in the tree, (1, 0) is the best child of (1,).
    assert given[2][0] == 1.0


def test_a_place_where_the_answer_ends_is_no_miss_of_deeper_heads() -> None:
    accuracy = conditional_accuracy([(0, 0), (0,)], 3, frozenset())
    assert accuracy[0][0] == 1.0 and accuracy[1][0] == 1.0 and accuracy[2][0] == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_the_chosen_tree_is_no_worse_than_that_of_all_places(seed: int) -> None:
    """Accuracies over all places are where the choice begins; passes start at some of them."""
    chooser = random.Random(seed)
    ranks = [0, 0, 0, 1, 1, 2, 3, NO]
    answers = [[tuple(chooser.choices(ranks, k=K)) for _ in range(50)] for _ in range(3)]
    # Easy places follow upon easy ones, so that decoding passes over them.
    answers.append([(0, 0, 0), (0, 0, 1), (0, 1, NO), (3, 0, 0)] * 12)
    places = [place for answer in answers for place in answer]
    begin = build_tree(conditional_accuracy(places, K, frozenset()), 6)
    tree, accuracy, walked = choose_tree(answers, K, 6)
    assert walked.tau == walk(answers, tree).tau >= walk(answers, begin).tau
    assert build_tree(accuracy, 6) == tree


def test_no_answer_long_enough(
    trained: MedusaHead, small_target: Target, requests: list[Request]
) -> None:
    with pytest.raises(HeadsmithError, match="none of the prompts with two tokens or more"):
        calibrate(trained, small_target, requests, nodes=4, max_new_tokens=1)


@pytest.fixture(scope="module")
def folders(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Fresh Medusa heads with their provenance, and prompts."""
    root = tmp_path_factory.mktemp("calibrate")
    target = Target.load(tiny_target_dir)
    head = MedusaHead.for_target(target, num_heads=K)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    head.save(root / "head")
    (root / "head" / "headsmith.json").write_text(json.dumps({"target": target_info(target)}))
    words = ["red green", "one two three", "blue"]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": w}) + "\n" for w in words))
    return root / "head", root / "prompts.jsonl"


def command(*args: object) -> int:
    return run(cli, [str(arg) for arg in args])


@pytest.mark.slow
def test_the_command_stores_a_tree_that_eval_drafts(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, prompts = folders
    same = ("--head", head, "--prompts", prompts, "--max-new-tokens", 16, "--device", "cpu")
    assert command("calibrate", *same, "--nodes", 12) == 0
    said = capsys.readouterr().out
    stored = read_calibration(head)
    assert stored is not None and len(stored.choices) <= 12
    assert f"{stored.about['predicted_tau']:.3f} tokens a pass" in said
    assert TREE_FILE in said
    raw = json.loads((head / TREE_FILE).read_text())
    assert raw["schema"] == "headsmith.medusa_tree/1" and raw["medusa_choices"] == stored.choices
    results = {}
    for draft in ("stored", "medusa:3"):
        path = tmp_path / "result.json"
        evaluated = command("eval", *same, "--draft", draft, "--no-baseline", "--json", path)
        assert evaluated == 0
        results[draft] = result = json.loads(path.read_text())
        assert result["equality"]["fails"] == 0 and result["head"]["kind"] == "medusa"
        assert result["setup"]["draft"] == draft
    tau = results["stored"]["overall"]["tau"]
    assert tau == pytest.approx(stored.about["predicted_tau"], rel=0.05)


def test_bad_input_is_one_sentence(
    folders: tuple[Path, Path],
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*args: Any) -> str:
        assert command(*args) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    head, prompts = folders
    eagle = tmp_path / "eagle"
    Eagle3Head.for_target(Target.load(tiny_target_dir), torch.arange(300)).save(eagle)
    more = ("--prompts", prompts, "--device", "cpu")
    assert "nodes is 0" in refused("calibrate", "--head", head, "--nodes", 0, *more)
    assert "not a folder" in refused("calibrate", "--head", tmp_path / "no", *more)
    said = refused("calibrate", "--head", eagle, "--target", tiny_target_dir, *more)
    assert "kind eagle3; only Medusa heads have a stored draft tree" in said
    bare = tmp_path / "bare"
    MedusaHead.for_target(Target.load(tiny_target_dir), num_heads=2).save(bare)
    said = refused("eval", "--head", bare, "--target", tiny_target_dir, "--draft", "stored", *more)
    assert "it has none; run headsmith calibrate" in said
