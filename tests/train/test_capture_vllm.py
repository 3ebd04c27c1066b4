"""The vllm backend without vLLM: what is asked of the other process, what is made of its answers,
and what is said when it fails. With vLLM itself: tests/real/test_capture_vllm.py.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headsmith.cli import cli, run
from headsmith.data import capture_server
from headsmith.data.feature_codec import decode
from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.models.target import Target
from headsmith.train.capture import Backend, capture
from headsmith.train.loop import train
from headsmith.train.recipe import Recipe, load_recipe

pytestmark = pytest.mark.slow
QUICK = ("train.max_steps=3", "validation.holdout=0", "data.max_rows=8", "data.row_tokens=128")

# Speaks for vllm_worker.py: the residual stream of each document alone, by transformers.
STUB = """#!{python}
import json, os, sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
answers = os.fdopen(int(sys.argv[2]), "w")
def answer(found):
    print(json.dumps(found), file=answers, flush=True)
settings = json.loads(sys.stdin.readline())
os.makedirs(settings["folder"])
model = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=settings["dtype"])
seen = {{}}
model.model.norm.register_forward_pre_hook(lambda module, args: seen.update(last=args[0][0]))
answer("ready")
for turn, line in enumerate(sys.stdin):
    files = []
    for ids in json.loads(line):
        assert len(ids) <= settings["longest"] - 1
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        stream = [*(state[0] for state in states[:-1]), seen["last"]]
        files.append(os.path.join(settings["folder"], f"{{turn}}-{{len(files)}}"))
        kept = torch.stack([stream[layer] for layer in settings["layers"]], 1)
        save_file({{"hidden_states": kept, "token_ids": torch.tensor(ids) + {wrong}}}, files[-1])
    answer(files)
"""


def stub(tmp_path: Path, wrong: int = 0) -> Backend:
    path = tmp_path / "python-with-vllm"
    path.write_text(STUB.format(python=sys.executable, wrong=wrong))
    path.chmod(0o755)
    return Backend("vllm", str(path))


def changed(recipe_file: Path, *overrides: str) -> Recipe:
    return load_recipe(str(recipe_file), [*QUICK, *overrides])


@pytest.mark.parametrize("kind", [("head.taps=[1,4,8]",), ("head.kind=medusa",)], ids=" ".join)
def test_its_states_are_those_of_transformers(
    recipe_file: Path, tmp_path: Path, metrics: Any, kind: tuple[str, ...]
) -> None:
    kind = (*kind, "head.draft_vocab_size=null")
    recipe = changed(recipe_file, *kind)
    own = capture(recipe, tmp_path / "own", "float32", 256)
    theirs = capture(recipe, tmp_path / "theirs", "float32", 256, stub(tmp_path))
    places = list(range(len(own.about["taps"])))
    for row in own.shard_of:
        some, others = (
            decode(store.read(row), places, torch.float32, "cpu") for store in (own, theirs)
        )
        torch.testing.assert_close(others.taps, some.taps, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(others.last, some.last, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(others.logsumexp, some.logsumexp, rtol=1e-4, atol=2e-5)
        assert torch.equal(others.choice, some.choice)
    for name in ("own", "theirs"):
        where = (f"data.features={tmp_path / name}", f"output.dir={tmp_path / name}-run")
        train(changed(recipe_file, *kind, *where))
    losses = [[line["loss"] for line in metrics(tmp_path / f"{n}-run")] for n in ("own", "theirs")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and len(losses[0]) == 3
    with pytest.raises(HeadsmithError, match="is transformers, float32 there and vllm, float32"):
        capture(recipe, tmp_path / "own", "float32", 256, stub(tmp_path))


def test_states_of_other_tokens_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadsmithError, match="of other tokens"):
        capture(changed(recipe_file), tmp_path / "s", "bfloat16", 256, stub(tmp_path, wrong=1))
    assert not list((tmp_path / "s").glob("shard-*"))


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nowhere/python", "/nowhere/python does not start (No such file or directory)"),
        ("false", "vLLM ended with code 1 while it computed states: it said nothing"),
        (sys.executable, "ModuleNotFoundError: No module named 'vllm'"),
    ],
)
def test_a_worker_that_does_not_come_up(
    recipe_file: Path, tmp_path: Path, python: str, said: str
) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        capture(changed(recipe_file), tmp_path / "s", "bfloat16", 256, Backend("vllm", python))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_asks_for_it(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(recipe_file), *QUICK, "--out", str(tmp_path / "s"), "--backend", "vllm"]
    assert run(cli, ["data", "capture", *arguments, "--vllm-python", "/nowhere/python"]) == 4
    assert "give the Python of an environment with vLLM" in capsys.readouterr().err


def test_the_target_is_not_loaded_whole(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Target) -> None:
        raise AssertionError("blocks are loaded")

    monkeypatch.setattr(Target, "check", fails)
    capture(changed(recipe_file), tmp_path / "store", "bfloat16", 256, stub(tmp_path))
    train(changed(recipe_file, f"data.features={tmp_path / 'store'}"))
    with pytest.raises(AssertionError, match="blocks are loaded"):
        capture(changed(recipe_file), tmp_path / "other", "bfloat16", 256)


@contextmanager
def serving(answer: Callable[[list[int]], dict[str, Any]]) -> Iterator[str]:
    """A server that answers completions of token ids; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "some-model"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (asked["model"], asked["max_tokens"]) == ("some-model", 1)
            self.reply({"kv_transfer_params": answer(asked["prompt"])})

        def reply(self, found: dict[str, Any]) -> None:
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_elsewhere_gives_the_same_features(
    recipe_file: Path, tmp_path: Path, target_dir: Path
) -> None:
    target, folder, recipe = Target.load(target_dir), tmp_path / "shared", changed(recipe_file)
    folder.mkdir()
    layers = (*target.default_taps(), target.num_layers)

    def answer(ids: list[int]) -> dict[str, Any]:
        taps: Tensor = target.features(torch.tensor(ids), [len(ids)], layers).taps
        file = folder / f"{hash(tuple(ids))}.safetensors"
        # As vLLM's own connector: a lock beside the file, let go of when the file is whole.
        file.with_name(f"{file.name}.lock").touch()
        save_file({"hidden_states": taps.clone(), "token_ids": torch.tensor(ids)}, file)
        return {"hidden_states_path": str(file)}

    own = capture(recipe, tmp_path / "own", "float32", 256)
    with serving(answer) as url:
        theirs = capture(
            recipe, tmp_path / "theirs", "float32", 256, Backend("vllm", server=f"{url}/")
        )
    for row in own.shard_of:
        some, others = own.read(row), theirs.read(row)
        torch.testing.assert_close(others["taps"], some["taps"], rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(others["last"], some["last"], rtol=1e-4, atol=2e-5)
    assert not list(folder.iterdir()), "what was read is gone"


def test_servers_that_cannot_be_used(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_server, "_SECONDS_FOR_A_FILE", 0.1)

    def refused(url: str) -> str:
        with pytest.raises(EnvironmentFault) as caught:
            store = tmp_path / "s"
            capture(changed(recipe_file), store, "bfloat16", 256, Backend("vllm", server=url))
        return str(caught.value)

    with serving(lambda ids: {}) as url:
        assert "keeps no hidden states" in refused(url)
    assert f"no vLLM server answers at {url} (" in refused(url)
    with serving(lambda ids: {"hidden_states_path": str(tmp_path / "elsewhere")}) as url:
        assert "must be a folder that both see" in refused(url)
    with pytest.raises(HeadsmithError, match="give both or neither"):
        capture(changed(recipe_file), tmp_path / "s", "bfloat16", 256, Backend(server=url))


def test_a_server_with_other_layers_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    def answer(ids: list[int]) -> dict[str, Any]:
        file = tmp_path / f"{hash(tuple(ids))}"
        save_file(
            {"hidden_states": torch.zeros(len(ids), 3, 64), "token_ids": torch.tensor(ids)}, file
        )
        return {"hidden_states_path": str(file)}

    with serving(answer) as url, pytest.raises(HeadsmithError) as caught:
        capture(changed(recipe_file), tmp_path / "s", "bfloat16", 256, Backend("vllm", server=url))
    assert "keeps 3 states of width 64 a token, and 4 of width 64 are needed" in str(caught.value)
    assert "eagle_aux_hidden_state_layer_ids [2, 4, 5, 8]" in str(caught.value)
