"""Heads of other projects: imported, verified, and exported again without loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headsmith.errors import HeadsmithError
from headsmith.inference.evaluate import EvalSettings, evaluate
from headsmith.models.eagle3 import Eagle3Head
from headsmith.models.formats.export import export
from headsmith.models.formats.imports import import_head
from headsmith.models.heads import load_head
from headsmith.models.target import Target

KEY = "eagle_aux_hidden_state_layer_ids"
H, V = 64, 300


def foreign(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def specforge(folder: Path, head: Path, ids: list[int] | None = None, **more: Any) -> Path:
    """What SpecForge leaves: no head_dim, ids of outputs in eagle_config, bfloat16."""
    config = json.loads((head / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    for key in ("head_dim", KEY, "eagle_config", "num_aux_hidden_states"):
        config.pop(key, None)
    if ids is not None:
        config["eagle_config"] = {KEY: ids, "use_aux_hidden_state": True}
    tensors = {
        name: t.bfloat16() if t.is_floating_point() else t
        for name, t in load_file(head / "model.safetensors").items()
    }
    return foreign(folder, config | more, tensors)


def speculators(folder: Path, head: Path, **more: Any) -> Path:
    """What the speculators trainer leaves, its own verifier tensors included."""
    config = json.loads((head / "config.json").read_text())
    body = {key: config[key] for key in config if key not in ("architectures", "fc_norm", KEY)}
    outer = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "fc_norm": config.get("fc_norm", False),
        "norm_output": config.get("norm_output", False),
        "norm_before_residual": True,
        KEY: [1, 3, 6],
        "transformer_layer_config": body,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": None}},
    }
    tensors = {
        name.replace("midlayer.", "layers.0."): t
        for name, t in load_file(head / "model.safetensors").items()
    }
    return foreign(folder, outer | more, tensors | {"verifier_norm.weight": torch.ones(H)})


def same_tensors(some: Path, others: Path, layer: str = "midlayer.") -> bool:
    """Bit for bit the same, but for the name of the layer and what only a trainer needs."""
    first, second = (
        {name.replace("layers.0.", "midlayer."): t for name, t in load_file(folder).items()}
        for folder in (some / "model.safetensors", others / "model.safetensors")
    )
    first.pop("verifier_norm.weight", None)
    return set(first) == set(second) and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


def verify(target: Target, head: Path) -> dict[str, Any]:
    """`headsmith eval` on an imported head: its text must be the target's own."""
    settings = EvalSettings(
        target=target.path,
        head=str(head),
        prompts="default:2",
        draft="chain:3",
        max_new_tokens=6,
        dtype="float32",
        device="cpu",
        baseline=False,
    )
    return evaluate(settings)


def test_a_head_of_specforge_comes_and_goes_without_loss(
    eagle: Callable[..., Path], target: Target, tmp_path: Path
) -> None:
    source = specforge(tmp_path / "sf", eagle(), ids=[0, 2, 5])
    done = import_head(source, tmp_path / "in", "specforge", target=target.path)
    assert done.kind == "eagle3" and done.read_as == "specforge"
    assert Eagle3Head.load(tmp_path / "in").taps == (1, 3, 6)
    assert same_tensors(source, tmp_path / "in")
    export(tmp_path / "in", "sglang", tmp_path / "out")
    assert same_tensors(source, tmp_path / "out")
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out")
    )
    assert after["eagle_config"] == before["eagle_config"] and after[KEY] == [1, 3, 6]
    assert {key: after[key] for key in before} == before
    # What SpecForge wrote is read again, in its own numbering.
    import_head(tmp_path / "out", tmp_path / "again", "specforge")
    assert same_tensors(source, tmp_path / "again")
    assert Eagle3Head.load(tmp_path / "again").config == Eagle3Head.load(tmp_path / "in").config


def test_a_head_of_speculators_comes_and_goes_without_loss(
    eagle: Callable[..., Path], target: Target, tmp_path: Path
) -> None:
    source = speculators(tmp_path / "sp", eagle("eagle3.1", taps=(1, 3, 6)))
    done = import_head(source, tmp_path / "in", target=target.path)
    assert done.read_as == "speculators" and done.kind == "eagle3.1"
    assert same_tensors(source, tmp_path / "in")
    export(tmp_path / "in", "speculators", tmp_path / "out")
    assert same_tensors(source, tmp_path / "out")
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out")
    )
    for key in ("fc_norm", "norm_output", "norm_before_residual", "draft_vocab_size", KEY):
        assert after[key] == before[key]
    with pytest.raises(HeadsmithError, match="norm_before_residual: only vLLM"):
        export(tmp_path / "in", "sglang", tmp_path / "sglang")


@pytest.mark.slow
def test_imported_heads_are_verified(
    eagle: Callable[..., Path], target: Target, tmp_path: Path
) -> None:
    head = eagle("eagle3.1", taps=(1, 3, 6))
    for source in (
        specforge(tmp_path / "sf", head, ids=[0, 2, 5], norm_output=False),
        speculators(tmp_path / "sp", head),
    ):
        kind = "specforge" if source.name == "sf" else "auto"
        import_head(source, tmp_path / f"{source.name}-in", kind, target=target.path)
        result = verify(target, tmp_path / f"{source.name}-in")
        assert result["equality"]["fails"] == 0 and result["equality"]["checked"] > 0


def test_ids_that_two_projects_read_differently_are_asked_for(
    eagle: Callable[..., Path], tmp_path: Path
) -> None:
    source = specforge(tmp_path / "sf", eagle(), ids=[1, 3, 6])
    with pytest.raises(HeadsmithError, match="vLLM reads as taps 1,3,6 and SGLang as 2,4,7"):
        import_head(source, tmp_path / "in")
    for kind, taps in (("vllm", (1, 3, 6)), ("sglang", (2, 4, 7)), ("trtllm", (2, 4, 7))):
        import_head(source, tmp_path / kind, kind)
        assert Eagle3Head.load(tmp_path / kind).taps == taps
    import_head(source, tmp_path / "given", taps=(0, 1, 2))
    assert Eagle3Head.load(tmp_path / "given").taps == (0, 1, 2)
    both = specforge(tmp_path / "both", tmp_path / "head", ids=[1, 3, 6], **{KEY: [0, 4, 5]})
    with pytest.raises(HeadsmithError, match="no two numberings"):
        import_head(both, tmp_path / "x")


def test_default_taps_stay_unnamed(
    eagle: Callable[..., Path], target: Target, tmp_path: Path
) -> None:
    source = specforge(tmp_path / "sf", eagle())
    import_head(source, tmp_path / "in", "specforge", target=target.path)
    assert KEY not in json.loads((tmp_path / "in/config.json").read_text())
    assert Eagle3Head.load(tmp_path / "in", num_target_layers=8).taps == (2, 4, 5)
    with pytest.raises(HeadsmithError, match="number of the target's blocks"):
        import_head(source, tmp_path / "x", "specforge")


def test_norm_output_of_specforge_is_asked_for(
    eagle: Callable[..., Path], target: Target, tmp_path: Path
) -> None:
    source = specforge(tmp_path / "sf", eagle("eagle3.1"), ids=[0, 2, 5])
    with pytest.raises(HeadsmithError, match="read in two ways"):
        import_head(source, tmp_path / "in", "specforge")
    for given in (False, True):
        out = tmp_path / str(given)
        import_head(source, out, "specforge", norm_output=given)
        assert Eagle3Head.load(out).config.norm_output is given
    assert import_head(source, tmp_path / "sg", "sglang").kind == "eagle3.1"


def test_a_rope_base_that_the_config_has_wrong(eagle: Callable[..., Path], tmp_path: Path) -> None:
    source = specforge(tmp_path / "sf", eagle(), ids=[0, 2, 5], rope_theta=1e6)
    import_head(source, tmp_path / "in", "sglang", rope_theta=10000.0)
    assert Eagle3Head.load(tmp_path / "in").config.rope["rope_theta"] == 10000.0
    silent = specforge(tmp_path / "no", tmp_path / "head")
    config = json.loads((silent / "config.json").read_text())
    del config["rope_theta"]
    (silent / "config.json").write_text(json.dumps(config))
    done = import_head(silent, tmp_path / "old", "eagle", taps=(2, 4, 5))
    assert any("10000" in line for line in done.warnings)


@pytest.mark.parametrize("container", ["safetensors", "pt"])
@pytest.mark.parametrize("lm_head", ["shared", "private"])
def test_medusa_heads_of_the_original_layouts(
    lm_head: str, container: str, medusa: Callable[..., Path], target: Target, tmp_path: Path
) -> None:
    head = medusa(lm_head)
    export(head, "tgi", tmp_path / "tgi")
    if container == "pt":
        file = tmp_path / "tgi/medusa_lm_head.safetensors"
        torch.save(load_file(file), file.with_suffix(".pt"))
        file.unlink()
    if lm_head == "shared":
        with pytest.raises(HeadsmithError, match="give the target with --target"):
            import_head(tmp_path / "tgi", tmp_path / "in")
    done = import_head(tmp_path / "tgi", tmp_path / "in", target=target.path)
    assert (done.kind, done.read_as) == ("medusa", "medusa")
    first, second = (load_file(f / "model.safetensors") for f in (head, tmp_path / "in"))
    assert set(first) == set(second) and all(torch.equal(first[n], second[n]) for n in first)
    assert load_head(tmp_path / "in", target).config == load_head(head, target).config
    assert json.loads((tmp_path / "in/headsmith.json").read_text())["target"]["num_layers"] == 8


def test_a_wrong_number_of_medusa_heads_is_found(
    medusa: Callable[..., Path], target: Target, tmp_path: Path
) -> None:
    export(medusa("private"), "tgi", tmp_path / "tgi")
    config = json.loads((tmp_path / "tgi/config.json").read_text()) | {"medusa_num_heads": 5}
    (tmp_path / "tgi/config.json").write_text(json.dumps(config))
    with pytest.raises(HeadsmithError, match="announces 5 Medusa heads and holds 3"):
        import_head(tmp_path / "tgi", tmp_path / "in", target=target.path)


def test_the_commands(
    eagle: Callable[..., Path], target: Target, tmp_path: Path, capsys: Any
) -> None:
    from headsmith.cli import cli, run

    source = specforge(tmp_path / "sf", eagle(), [0, 2, 5])
    inside, out = str(tmp_path / "in"), str(tmp_path / "out")
    given = ["import", str(source), "--out", inside, "--from", "specforge"]
    assert run(cli, [*given, "--target", target.path]) == 0
    assert run(cli, ["export", inside, "--to", "vllm", "--out", out]) == 0
    assert "40 of 40 drafts equal" in capsys.readouterr().out
    assert run(cli, ["export", inside, "--to", "tgi", "--out", out + "2"]) == 2
    assert "TGI drafts with Medusa heads" in capsys.readouterr().err
    assert run(cli, ["import", str(source), "--out", inside, "--taps", "1;2"]) == 2
    assert not Path(out + "2").exists()
