"""The `headsmith` command: a table of subcommands that are imported only when they are called.

`headsmith --help` therefore imports no torch and answers at once. A room writes its command where
its code lives and is listed here; this module only turns what went wrong into one sentence and an
exit code: 0 done, 1 gate not met, 2 usage or configuration, 3 equality failed, 4 environment.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import click

from headsmith import __version__
from headsmith.errors import EnvironmentFault, HeadsmithError
from headsmith.files import is_disk_full

INTERRUPTED = 130


class Entry(NamedTuple):
    """Where a subcommand lives (`module:attribute`) and the line that the listing shows for it."""

    where: str
    help: str


COMMANDS = {
    "train": Entry("headsmith.train.cli:train", "Train a head from a recipe."),
    "data": Entry("headsmith.data.cli:data", "Prepare, regenerate, mix, clean, capture data."),
    "eval": Entry("headsmith.inference.cli:eval_", "Measure a head: tau, rates, speed, equality."),
    "tune": Entry("headsmith.inference.tune_cli:tune_", "Pick a draft and a batch limit."),
    "profile": Entry(
        "headsmith.inference.profile_cli:profile_", "Show what a round costs, and what pays."
    ),
    "calibrate": Entry(
        "headsmith.inference.calibrate_cli:calibrate", "Build the draft tree of Medusa heads."
    ),
    "export": Entry(
        "headsmith.models.formats.cli:export", "Write a head as vLLM, SGLang and others load it."
    ),
    "import": Entry(
        "headsmith.models.formats.cli:import_", "Take in a head that somebody else made."
    ),
    "doctor": Entry(
        "headsmith.models.doctor.cli:doctor", "Check a head against its target, before it runs."
    ),
    "push": Entry("headsmith.models.hub.cli:push", "Publish a head on the Hub with a model card."),
    "pull": Entry("headsmith.models.hub.cli:pull", "Fetch a head from the Hub."),
    "compare": Entry(
        "headsmith.inference.compare_cli:compare_", "Compare measured runs on the same prompts."
    ),
    "report": Entry(
        "headsmith.inference.report_cli:report", "Write the report of a measured run again."
    ),
    "target": Entry("headsmith.models.embedded:cli", "Fetch the embedded default target."),
}

# Commands of a group that are not written where the group is; `regenerate` needs two rooms of which
# neither may import the other.
ADOPTED = {
    "data": {
        "regenerate": "headsmith.regenerate_cli:regenerate",
        "mix": "headsmith.data.sets_cli:mix",
        "dedup": "headsmith.data.sets_cli:dedup",
        "overlap": "headsmith.data.sets_cli:overlap",
        "capture": "headsmith.train.capture_cli:capture",
    }
}

# Distribution extras that bring an optional library, by the library's import name.
EXTRAS = {
    "wandb": "trackers",
    "tensorboard": "trackers",
    "matplotlib": "report",
    "prometheus_client": "metrics",
    "deepspeed": "deepspeed",
    "triton": "kernels",
    "vllm": "vllm",
}


def _imported(where: str) -> click.Command:
    module, attribute = where.split(":")
    command: click.Command = getattr(import_module(module), attribute)
    return command


class LazyGroup(click.Group):
    """A click group that reads its listing from COMMANDS and imports a command on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = _imported(COMMANDS[cmd_name].where)
        for name, where in ADOPTED.get(cmd_name, {}).items():
            assert isinstance(command, click.Group)
            command.add_command(_imported(where), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headsmith")
def cli() -> None:
    """Train draft heads for speculative decoding and prove what they are worth."""


def run(command: click.Command, args: Sequence[str] | None = None, name: str = "headsmith") -> int:
    """Run a click command; return its exit code after printing any fault as one sentence.

    Bugs of ours keep their traceback. `args` defaults to the process's own arguments.
    """
    try:
        outcome = command.main(args, prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"headsmith: error: {usage_fault(error)}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("headsmith: interrupted", err=True)
        return INTERRUPTED
    except Exception as error:
        fault = as_fault(error)
        if fault is None:
            raise
        click.echo(f"headsmith: error: {fault}", err=True)
        return fault.exit_code
    # click hands back the code of ctx.exit(), or whatever the command returned.
    return outcome if isinstance(outcome, int) else 0


def usage_fault(error: click.ClickException) -> str:
    """What click says of the arguments, as one sentence that ends with where to look."""
    said = " ".join(error.format_message().split()).rstrip(".")
    said = said.replace(". (", " (").replace(". ", "; ")
    context = getattr(error, "ctx", None)
    where = f"; see {context.command_path} --help" if context is not None else ""
    return said[:1].lower() + said[1:] + where


def as_fault(error: Exception) -> HeadsmithError | None:
    """The user's or the machine's fault behind an exception; None if it is a bug of ours."""
    if isinstance(error, HeadsmithError):
        return error
    if is_disk_full(error):
        return EnvironmentFault("the disk is full; free some space and run again")
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentFault(
            f"cannot write or read {error.filename} ({error.strerror}); check its permissions"
        )
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("headsmith"):
        library = (error.name or "").split(".")[0]
        package = f"'headsmith[{EXTRAS[library]}]'" if library in EXTRAS else library
        return EnvironmentFault(
            f"the library {library} is not installed; run: pip install {package}"
        )
    # torch.OutOfMemoryError by name, because this module must not import torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return EnvironmentFault(
            "out of memory; use a smaller batch or context, or a smaller target"
        )
    return None


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(cli))
