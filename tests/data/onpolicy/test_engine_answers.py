"""The project's own engine answers: one text for every batch, drafter and interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headsmith.cli import cli, run
from headsmith.data.onpolicy.journal import journal_of
from headsmith.inference.engine import Decoder
from headsmith.inference.records import Request
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.provenance import target_info
from headsmith.models.target import Target

Read = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.load(tiny_target_dir)


@pytest.fixture(scope="module")
def head(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of all ids, so that some of its drafts are right."""
    folder = tmp_path_factory.mktemp("head")
    Eagle3Head.for_target(target, torch.arange(target.vocab_size)).save(folder)
    (folder / "headsmith.json").write_text(json.dumps({"target": target_info(target)}))
    return folder


@pytest.fixture
def regenerate(
    tiny_target_dir: Path, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, Path]]:
    """regenerate(*options, name="out"): exit code, standard error and the output of a command."""

    def call(
        *options: object, name: str = "out", given: object = source, engine: bool = True
    ) -> tuple[int, str, Path]:
        out = tmp_path / f"{name}.jsonl"
        words = ["data", "regenerate", given, "--out", out, "--max-new-tokens=7"]
        words += ["--device=cpu"] if engine else []
        if not any(str(option).startswith("--head") for option in options):
            words += ["--target", tiny_target_dir]
        capsys.readouterr()
        code = run(cli, [str(word) for word in (*words, *options)])
        return code, capsys.readouterr().err, out

    return call


def test_later_turns_follow_what_the_target_said(
    regenerate: Any, target: Target, read: Read
) -> None:
    code, said, out = regenerate()
    assert code == 0 and "4 conversations (4 new, 0 from before)" in said
    row = read(out)[2]
    messages = row["messages"]
    assert [m["role"] for m in messages] == "system user assistant user assistant".split()
    for turn, place in enumerate((2, 4)):
        text = target.tokenizer.apply_chat_template(
            messages[:place], tokenize=False, add_generation_prompt=True
        )
        ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
        ((response,), _) = Decoder(target, max_new_tokens=7).generate([Request("x", "t", ids)])
        own = target.tokenizer.decode(response.output_ids, skip_special_tokens=True)
        assert own.removesuffix("\ufffd").strip() == messages[place]["content"]
        assert (response.finish_reason == "length") == (row["finish"][turn] == "length")


SAMPLED = ("--temperature=1.5", "--top-p=0.95", "--top-k=50", "--seed=3")


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [(), SAMPLED], ids=["greedy", "sampled"])
def test_text_does_not_depend_on_batch_or_drafter(
    regenerate: Any, head: Path, sampling: tuple[str, ...]
) -> None:
    texts = {
        regenerate(*sampling, *more, name=str(number))[2].read_text()
        for number, more in enumerate(
            [
                ("--batch=1",),
                ("--batch=3",),
                (f"--head={head}", "--batch=2"),
                (f"--head={head}", "--draft=tree:6,2,3", "--batch=3"),
                ("--drafter=ngram:1,3",),
            ]
        )
    }
    assert len(texts) == 1


def test_drawn_text_depends_on_the_seed_and_not_on_the_place(
    regenerate: Any, source: str, tmp_path: Path, read: Read
) -> None:
    one = regenerate(*SAMPLED, name="one")[2]
    turned = tmp_path / "turned.jsonl"
    rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
    turned.write_text(
        "".join(json.dumps({**row, "id": i}) + "\n" for i, row in enumerate(rows[::-1]))
    )
    two = regenerate(*SAMPLED, name="two", given=turned)[2]
    assert [row["messages"] for row in read(one)] == [row["messages"] for row in read(two)][::-1]
    other = regenerate(*SAMPLED[:-1], "--seed=4", name="other")[2]
    assert [r["messages"] for r in read(one)] != [r["messages"] for r in read(other)]


def test_greedy_and_other_settings_do_not_share_a_file(regenerate: Any) -> None:
    assert regenerate()[0] == 0
    code, said, _ = regenerate("--max-new-tokens=6", "--temperature=1")
    assert code == 2 and "max-new-tokens was 7 and is 6; temperature was 0.0 and is 1.0" in said
    # What the text does not depend on may be another.
    assert "(0 new, 4 from before)" in regenerate("--batch=2", "--cut-answers=keep")[1]


# Ends itself by SIGKILL, which nothing can catch, in the middle of writing its Nth answer.
KILLED = """
import os, signal, sys
from headsmith.cli import cli, run
from headsmith.data.onpolicy.journal import Journal

append, left = Journal._append, int(sys.argv[1])

def die(self, line):
    global left
    left -= 1
    if left == 0:
        self._file.write(b'{"key": "and here the power fai')
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return append(self, line)

Journal._append = die
sys.exit(run(cli, sys.argv[2:]))
"""


@pytest.mark.slow
def test_killed_for_good_it_goes_on(tiny_target_dir: Path, tmp_path: Path) -> None:
    """In the first wave of turns and in the last; then the text of a run left alone."""
    source = tmp_path / "many.jsonl"
    rows = [{"turns": [f"tea {i}", "and then?", "why"]} for i in range(8)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def words(name: str) -> list[str]:
        options = ["--max-new-tokens=12", "--batch=3", "--temperature=1", "--device=cpu"]
        where = ["--target", str(tiny_target_dir), "--out", str(tmp_path / name)]
        return ["data", "regenerate", str(source), *options, *where]

    def lines(name: str) -> int:
        return journal_of(tmp_path / name).read_bytes().count(b"\n")

    assert run(cli, words("whole.jsonl")) == 0
    whole = lines("whole.jsonl")
    assert whole > 20
    for number, kept in ((4, 3), (15, 17)):
        process = [sys.executable, "-c", KILLED, str(number), *words("out.jsonl")]
        assert subprocess.run(process, capture_output=True).returncode == -signal.SIGKILL
        assert lines("out.jsonl") == kept and not (tmp_path / "out.jsonl").exists()
    assert run(cli, words("out.jsonl")) == 0
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    # No answer was made twice.
    assert lines("out.jsonl") == whole


@pytest.mark.parametrize("turns", [["word " * 600], ["one", "word " * 600]])
def test_a_turn_that_does_not_fit_costs_only_its_conversation(
    regenerate: Any, tmp_path: Path, read: Read, turns: list[str]
) -> None:
    long = tmp_path / "long.jsonl"
    rows = [{"id": "long", "turns": turns}, {"id": "short", "prompt": "tea?"}]
    long.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said, out = regenerate(given=long)
    assert code == 0 and [row["id"] for row in read(out)] == ["short"]
    assert "left out, too long: 1 (such as: a prompt of 3" in said


def test_a_template_that_refuses_costs_only_its_conversation(
    regenerate: Any, target: Target, tiny_target_dir: Path, tmp_path: Path, read: Read
) -> None:
    folder = tmp_path / "strict"
    folder.mkdir()
    for path in tiny_target_dir.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(strict + target.tokenizer.chat_template)
    code, said, out = regenerate("--target", folder)
    assert (
        code == 0 and len(read(out)) == 3 and "left out, template: 1 (such as: no system)" in said
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model=x",), "--model is for the server, and the engine answers; leave it out, or"),
        (("--server=http://h", "--batch=4"), "--batch is for the engine, and the server answers"),
        (("--server=http://h",), "a server answers, but which? add --model"),
        (("--server=h:8000", "--model=x"), "give for example http://localhost:8000/v1"),
        (("--backend=server", "--model=x"), "add --server"),
        (("--top-p=0.5",), "top-p means nothing at temperature 0"),
        (("--template-args=[1]",), "template-args is [1]; it must be a JSON object"),
        (("--template-args={",), "template-args is no JSON"),
        (("--thinking-tags=x",), "thinking-tags 'x' are not two texts"),
        (("--batch=0",), "batch is 0"),
        (("--head=nowhere",), "there is no head in nowhere"),
        (("--drafter=text",), "drafter text expects an answer"),
        (("--vllm-python=/nowhere/python",), "/nowhere/python cannot be started"),
        (("--backend=vllm",), "vllm is not installed in this Python"),
    ],
)
def test_a_mistake_is_one_sentence(
    regenerate: Any, options: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--backend=vllm" in options:
        monkeypatch.setitem(sys.modules, "vllm", None)
    code, said, out = regenerate(*options, engine=False)
    assert code in (2, 4) and said.startswith("headsmith: error: ") and said.count("\n") == 1
    assert words in said and not out.exists() and not journal_of(out).exists()


def test_sources_that_cannot_be(regenerate: Any, tmp_path: Path, source: str) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"prompt": " "}\n{"text": "x"}\n')
    for given, words in (
        (tmp_path / "none.jsonl", "check the path"),
        (empty, "holds no conversation that can be used (1 empty content, 1 no messages)"),
    ):
        code, said, _ = regenerate(given=given)
        assert code == 2 and words in said and said.count("\n") == 1
    code, said, _ = regenerate("--out", source)
    assert code == 2 and "is also read; choose another --out" in said
