"""`headsmith data`: what a person sees, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headsmith.cli import cli, run
from headsmith.data.mask import Encoded, encode
from headsmith.data.prepare import load_prepared, prepare
from headsmith.data.show import coloured, totals


@pytest.fixture
def target(tokenizer: Any, tmp_path: Path) -> Path:
    """A folder that holds only what a tokenizer needs."""
    path = tmp_path / "target"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def headsmith(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*args: Any) -> tuple[int, str, str]:
        code = run(cli, [str(arg) for arg in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_prepare_prints_the_folder_and_every_count(
    headsmith: Any, target: Path, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    source = write_source([chat("q", "a"), chat("q", "a"), chat("q", "b"), chat("q")])
    args = ("data", "prepare", source, "--target", target, "--out", tmp_path / "out")
    code, out, err = headsmith(*args)
    assert code == 0
    prepared = load_prepared(out.strip())
    assert prepared is not None and len(prepared.dataset) == 2
    for line in ("duplicate", "no assistant message", "trained tokens"):
        assert line in err
    again = headsmith(*args)
    assert again[0] == 0 and again[1] == out and "prepared before" in again[2]


def test_prepare_shows_the_warnings_of_the_source(
    headsmith: Any, target: Path, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    source = write_source([chat("q", "a"), chat("q", "b")])
    source.write_bytes(source.read_bytes()[:-9])
    code, _, err = headsmith("data", "prepare", source, "--target", target, "--out", tmp_path)
    assert code == 0
    assert f"it ends at byte {source.stat().st_size} inside the record" in " ".join(err.split())


def test_inspect_marks_what_is_trained(
    headsmith: Any, target: Path, chat: Any, write_source: Any
) -> None:
    source = write_source([chat("q", "good answer"), chat("r", "other"), chat("s", "third")])
    code, out, _ = headsmith("data", "inspect", source, "--target", target, "-n", 2)
    assert code == 0
    assert "\u27e6good answer<|im_end|>\u27e7" in out and "\u27e6other<|im_end|>\u27e7" in out
    assert "third" not in out
    assert out.count("-- document ") == 2 and "1 answer\n" in out


def test_inspect_colours_on_request(
    headsmith: Any, target: Path, chat: Any, write_source: Any
) -> None:
    source = write_source([chat("q", "good answer")])
    code, out, _ = headsmith("data", "inspect", source, "--target", target, "--color")
    assert code == 0
    assert "\x1b[1;32mgood answer<|im_end|>\x1b[0m" in out and "\u27e6" not in out


def test_inspect_shows_prepared_data_as_it_will_be_trained(
    headsmith: Any, target: Path, tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    source = write_source([chat("q", "good answer", "later")])
    prepared = prepare(source, tokenizer, tmp_path / "out")
    code, out, _ = headsmith("data", "inspect", prepared.path, "--target", target)
    assert code == 0
    assert "\u27e6good answer<|im_end|>\u27e7" in out and "later" not in out


def test_another_template_can_be_given(
    headsmith: Any, target: Path, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    template = Path(__file__).parent / "templates" / "mistral.jinja"
    code, out, _ = headsmith(
        *("data", "inspect", write_source([chat("q", "a")]), "--target", target),
        *("--chat-template", template),
    )
    assert code == 0 and "[INST] q [/INST]" in out


@pytest.mark.parametrize("command", ["prepare", "inspect"])
def test_a_mistake_is_one_sentence_and_exit_code_2(
    headsmith: Any, target: Path, tmp_path: Path, command: str
) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("")
    for source, place, words in (
        (tmp_path / "no.json", target, "check the path"),
        (empty, target, "is empty"),
        (empty, tmp_path / "no-target", "does not exist"),
        (empty, tmp_path, "holds no tokenizer"),
    ):
        code, _, err = headsmith("data", command, source, "--target", place)
        assert code == 2
        assert err.startswith("headsmith: error: ") and words in err and err.count("\n") == 1


def test_inspect_of_another_tokenizers_rows_is_refused(
    headsmith: Any, target: Path, tokenizer: Any, chat: Any, write_source: Any, tmp_path: Path
) -> None:
    path = prepare(write_source([chat("q", "a")]), tokenizer, tmp_path / "out").path
    small = tmp_path / "small"
    small.mkdir()
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (small / name).write_text((target / name).read_text())
    state = json.loads((small / "tokenizer.json").read_text())
    state["model"]["vocab"] = {k: v for k, v in state["model"]["vocab"].items() if v < 20}
    state["model"]["merges"] = []
    (small / "tokenizer.json").write_text(json.dumps(state))
    code, _, err = headsmith("data", "inspect", path, "--target", small)
    assert code == 2 and "inspect them with the target they were prepared for" in err


def test_coloured_text_is_the_whole_text(tokenizer: Any, chat: Any) -> None:
    messages = chat("ask [bold]me[/]", "caf\u00e9 \U0001f600", "b", "c")
    document = encode(tokenizer, messages)
    text = coloured(tokenizer, document)
    assert text.plain == tokenizer.apply_chat_template(messages, tokenize=False)
    green = "".join(text.plain[s.start : s.end] for s in text.spans if s.style == "bold green")
    assert green == "caf\u00e9 \U0001f600<|im_end|>c<|im_end|>"
    Console(file=None, force_terminal=False).render_str("")


def test_totals() -> None:
    assert totals(3, Encoded([1, 2, 3, 4], [0, 1, 0, 1])) == (
        "-- document 3: 4 tokens, 2 trained (50%), 2 answers"
    )
    assert totals(0, Encoded([1, 2], [0, 1])).endswith("1 trained (50%), 1 answer")
