"""Exports are read back by other code; what an engine cannot hold is refused; nothing half-written
stays.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.drafters import EagleDrafter, Update
from headsmith.inference.tree import Chain
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.formats import export as exporting
from headsmith.models.formats.check import chain, check_export
from headsmith.models.formats.export import export
from headsmith.models.target import Target

ENGINES = ["vllm", "sglang", "trtllm", "speculators", "eagle"]


def test_what_reads_back_shares_no_code_with_what_writes(root: Path) -> None:
    readers = ("reader_eagle", "reader_medusa", "reader_rules", "reader_tensors")
    for reader in readers:
        tree = ast.parse((root / "models/formats" / f"{reader}.py").read_text())
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Import) or "headsmith" not in node.names[0].name
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("headsmith"):
                own = [f"headsmith.models.formats.{name}" for name in readers]
                assert node.module in ["headsmith.errors", *own]


def test_the_drafts_compared_are_those_of_the_drafter(
    eagle: Callable[..., Path], target: Target
) -> None:
    head = Eagle3Head.load(eagle("eagle3.1"), num_target_layers=8)
    ids = torch.randint(300, (9,), generator=torch.Generator().manual_seed(3))
    taps = target.features(ids, [9], head.taps).taps[:-1].clone()
    drafter = EagleDrafter(head, target, Chain(4))
    drafter.reset(1, 64)
    (tree,) = drafter.propose([Update(0, ids[1:].tolist(), taps)])
    _, drafts = chain(head, taps, ids[1:], 4, target.embed)
    assert tree.tokens[1:] == drafts


@pytest.mark.parametrize(
    ("kind", "engine"),
    # The original code knows no 3.1; test_layouts has the refusal.
    [*product(["eagle3"], ENGINES), *product(["eagle3.1"], sorted({*ENGINES} - {"eagle"}))],
)
def test_the_command_compares_every_draft(
    engine: str, kind: str, eagle: Callable[..., Path], tmp_path: Path
) -> None:
    done = export(eagle(kind), engine, tmp_path / "out")
    assert done.checked.drafts == done.checked.equal == 40
    assert done.checked.difference < 1e-5
    about = json.loads((tmp_path / "out/headsmith.json").read_text())
    assert about["export"]["drafts_equal"] == 40 and about["export"]["to"] == engine
    assert about["target"]["num_layers"] == 8


SPOILED: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], object]] = {
    "a tensor is lost": lambda t, c: t.pop("midlayer.self_attn.q_proj.weight"),
    "a tensor is unknown": lambda t, c: t.update({"model.norm.weight": t["norm.weight"].clone()}),
    "d2t is lost": lambda t, c: t.pop("d2t"),
    "d2t holds ids": lambda t, c: t.update(d2t=t["d2t"] + torch.arange(48)),
    "taps are off by one": lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=[3, 5, 6]),
    "norm_output is lost": lambda t, c: c.pop("norm_output"),
    "fc_norm is lost": lambda t, c: c.pop("fc_norm"),
    "RoPE has another base": lambda t, c: c.update(rope_theta=500.0),
    "norms have another eps": lambda t, c: c.update(rms_norm_eps=1e-2),
    "the residual is normed": lambda t, c: c.update(norm_before_residual=True),
    "norms are all one": lambda t, c: t.update({"norm.weight": torch.ones(64)}),
    "the lm_head is tied": lambda t, c: c.update(tie_word_embeddings=True),
    "the width is null": lambda t, c: c.update(target_hidden_size=None),
}


@pytest.mark.parametrize("fault", SPOILED)
def test_what_engines_pass_over_in_silence_is_found(
    fault: str, eagle: Callable[..., Path], tmp_path: Path
) -> None:
    """The defects of spec/engines.md 5, each put into a good export."""
    folder, out = eagle("eagle3.1"), tmp_path / "out"
    export(folder, "vllm", out)
    tensors, config = load_file(out / "model.safetensors"), json.loads(_config(out).read_text())
    SPOILED[fault](tensors, config)
    save_file(tensors, out / "model.safetensors")
    _config(out).write_text(json.dumps(config))
    head = Eagle3Head.load(folder, num_target_layers=8)
    with pytest.raises(HeadsmithError):
        check_export(head, out, "vllm", 8, torch.float32)


def _config(folder: Path) -> Path:
    return folder / "config.json"


@pytest.mark.parametrize("name", ["vllm", "tgi", "trtllm"])
@pytest.mark.parametrize("lm_head", ["shared", "private"])
def test_medusa_heads_are_compared_too(
    name: str, lm_head: str, medusa: Callable[..., Path], tmp_path: Path
) -> None:
    done = export(medusa(lm_head, layers=2), name, tmp_path / "out")
    assert done.checked.drafts == done.checked.equal == 24
    file = "model.safetensors" if name == "vllm" else "medusa_lm_head.safetensors"
    tensors = load_file(tmp_path / "out" / file)
    bias = next(key for key in tensors if key.endswith("bias"))
    tensors[bias] = torch.zeros_like(tensors[bias])
    save_file(tensors, tmp_path / "out" / file)
    from headsmith.models.heads import read_head

    with pytest.raises(HeadsmithError, match="drafts otherwise"):
        check_export(read_head(tmp_path / "head", 8), tmp_path / "out", name, 8, torch.float32)


def test_one_norm_over_all_taps_is_found_where_each_engine_looks(
    eagle: Callable[..., Path], target: Target, draft_ids: Tensor, tmp_path: Path
) -> None:
    from dataclasses import replace

    head = Eagle3Head.for_target(target, draft_ids)
    head = Eagle3Head(replace(head.config, norm_before_fc=True), draft_ids)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.3)
    head.save(tmp_path / "one")
    for engine, where in (("vllm", None), ("sglang", None), ("trtllm", "eagle_config")):
        out = tmp_path / engine
        export(tmp_path / "one", engine, out, target=target.path)
        config = json.loads(_config(out).read_text())
        assert (config if where is None else config[where])["norm_before_fc"] is True


def set_flag(name: str, value: Any) -> Callable[[Eagle3Head], None]:
    from dataclasses import replace

    def change(head: Eagle3Head) -> None:
        head.config = replace(head.config, **{name: value})

    return change


@pytest.mark.parametrize(
    ("engine", "kind", "change", "words"),
    [
        ("tgi", "eagle3", {}, "TGI drafts with Medusa heads"),
        ("eagle", "eagle3.1", {}, "EAGLE-3 and not EAGLE-3.1"),
        ("eagle", "eagle3", {"taps": (1, 3, 6)}, "always reads the default ones"),
        ("eagle", "eagle3", {"head_dim": 8}, "head_dim of 8 where 16"),
        ("speculators", "eagle3", {"hidden_size": 32}, "as wide as its target"),
        ("sglang", "eagle3", {"change": set_flag("norm_before_residual", True)}, "only vLLM"),
        ("trtllm", "eagle3", {"change": set_flag("norm_before_residual", True)}, "only vLLM"),
        ("trtllm", "eagle3", {"change": set_flag("sliding_window", 32)}, "attend to everything"),
    ],
)
def test_what_an_engine_cannot_hold_is_refused(
    engine: str,
    kind: str,
    change: dict[str, Any],
    words: str,
    eagle: Callable[..., Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(HeadsmithError, match=words):
        export(eagle(kind, **change), engine, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("engine", "lm_head", "words"),
    [
        ("sglang", "shared", "SGLang knows no Medusa"),
        ("speculators", "private", "has no Medusa"),
        ("eagle", "shared", "EAGLE heads only"),
        ("tgi", "truncated", "no draft vocabulary"),
        ("trtllm", "truncated", "no draft vocabulary"),
    ],
)
def test_what_an_engine_cannot_hold_of_medusa_is_refused(
    engine: str, lm_head: str, words: str, medusa: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(HeadsmithError, match=words):
        export(medusa(lm_head), engine, tmp_path / "out")


def test_narrow_and_windowed_heads(eagle: Callable[..., Path], tmp_path: Path) -> None:
    folder = eagle("eagle3.1", hidden_size=32, taps=(1, 3, 6))
    for engine in ("vllm", "sglang", "trtllm"):
        out = tmp_path / engine
        assert export(folder, engine, out).checked.equal == 40
        assert json.loads(_config(out).read_text())["target_hidden_size"] == 64
        assert "embed_tokens.weight" in load_file(out / "model.safetensors")
    windowed = eagle(change=set_flag("sliding_window", 4))
    for engine in ("vllm", "sglang", "speculators"):
        assert export(windowed, engine, tmp_path / f"w-{engine}").checked.equal == 40
    script = (tmp_path / "w-sglang/launch/sglang.sh").read_text()
    assert "--speculative-draft-window-size 4" in script


def test_nothing_stays_of_an_export_that_drafts_otherwise(
    eagle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = eagle()
    written = exporting.write_head

    def spoil(head: Any, name: str, out: Path, *rest: Any) -> None:
        written(head, name, out, *rest)
        tensors = load_file(out / "model.safetensors")
        tensors["fc.weight"] = tensors["fc.weight"].flip(1).contiguous()
        save_file(tensors, out / "model.safetensors")

    monkeypatch.setattr(exporting, "write_head", spoil)
    with pytest.raises(HeadsmithError, match="drafts otherwise than the head"):
        export(folder, "vllm", tmp_path / "deep/out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head"]


def test_a_folder_that_is_there_is_not_replaced_unasked(
    eagle: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = eagle(), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(HeadsmithError, match="is there already"):
        export(folder, "vllm", out)
    with pytest.raises(HeadsmithError, match="holds the head itself"):
        export(folder, "vllm", folder, overwrite=True)
    with pytest.raises(HeadsmithError, match="holds the head itself"):
        export(folder, "vllm", folder.parent, overwrite=True)
    assert (out / "mine.txt").is_file() and (folder / "config.json").is_file()
    export(folder, "vllm", out, overwrite=True)
    assert not (out / "mine.txt").exists() and (out / "config.json").is_file()


def test_a_head_of_no_known_target(
    eagle: Callable[..., Path], target: Target, tmp_path: Path
) -> None:
    folder = eagle()
    (folder / "headsmith.json").unlink()
    with pytest.raises(HeadsmithError, match="add --target"):
        export(folder, "vllm", tmp_path / "out")
    with pytest.raises(HeadsmithError, match="how many blocks"):
        export(folder, "vllm", tmp_path / "out", target="ORG/NAME")
    export(folder, "vllm", tmp_path / "out", target=target.path, serve_as="ORG/NAME")
    assert "ORG/NAME" in (tmp_path / "out/DEPLOY.md").read_text()
    assert "ORG/NAME" in (tmp_path / "out/launch/vllm.sh").read_text()
