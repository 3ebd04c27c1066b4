"""What of accelerate's configuration is followed, and what is refused in which words."""

from pathlib import Path

import pytest
import yaml

from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.train import launch
from headsmith.train.launch import Launch, read_launch, take_launch

DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
FSDP = {"ACCELERATE_USE_FSDP": "true"}
PROCESSES = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5"}


def launched(patch: pytest.MonkeyPatch, **environment: str) -> Launch:
    for name in (*DEEPSPEED, *FSDP, "FSDP_VERSION", *PROCESSES):
        patch.delenv(name, raising=False)
    for name, value in environment.items():
        patch.setenv(name, value)
    return read_launch()


@pytest.mark.parametrize(
    ("environment", "way"),
    [
        ({}, "replicated"),
        (FSDP | {"FSDP_VERSION": "2"}, "fsdp2"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "zero2"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3"),
    ],
)
def test_the_way_of_a_launch(
    environment: dict[str, str], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = launched(monkeypatch, **environment, **PROCESSES)
    assert (found.way, found.processes, found.local, found.rank) == (way, 8, 4, 5)
    # A process alone has nothing to share.
    assert launched(monkeypatch, **environment).way == "replicated"


def test_no_other_library_follows_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, **FSDP, FSDP_VERSION="2", WORLD_SIZE="2")
    assert take_launch().way == "fsdp2"
    assert read_launch().way == "replicated"


def test_a_library_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, **DEEPSPEED, WORLD_SIZE="2")
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"headsmith\[deepspeed\]"):
        take_launch()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (FSDP | {"FSDP_VERSION": "1"}, "FSDP version 1 is not supported; set fsdp_version: 2"),
        (FSDP, "FSDP version 1"),
        (FSDP | {"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: false"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "set zero_stage: 2 or 3"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, "leave deepspeed_config"),
        (
            DEEPSPEED | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
            "leave offload_optimizer_device out",
        ),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config"),
    ],
)
def test_what_is_refused(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HeadsmithError) as caught:
        launched(monkeypatch, **environment, WORLD_SIZE="2")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_every_configuration_is_one_that_is_followed(root: Path) -> None:
    """The files say what the launch reads, under the names that accelerate gives it."""
    ways = set()
    for path in (root / "recipes" / "accelerate").glob("*.yaml"):
        config = yaml.safe_load(path.read_text())
        assert f"--config_file recipes/accelerate/{path.name}" in path.read_text()
        assert path.stem.split("-")[1] == str(config["num_processes"])
        kind, suffix = config["distributed_type"], path.stem.split("-")[2:]
        if kind == "FSDP":
            assert config["fsdp_config"]["fsdp_version"] == 2
        elif kind == "DEEPSPEED":
            assert suffix == [f"zero{config['deepspeed_config']['zero_stage']}"]
        assert bool(suffix) == (kind != "MULTI_GPU")
        ways.update(suffix)
    assert ways == {"fsdp2", "zero2", "zero3"}
