"""Arguments and flags that several commands share; the fields of Plan as flags."""

import dataclasses
import inspect
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperGroup

from nearkin.console import Reporter
from nearkin.data.images import counted, listed
from nearkin.networks.backbones import backbone_settings
from nearkin.search.names import escape_name
from nearkin.training.plan import Plan

RunArgument = Annotated[Path, typer.Argument(help="Folder of a run.")]
RunsArgument = Annotated[list[Path], typer.Argument(help="Folders of finished runs.")]
IndexArgument = Annotated[str, typer.Argument(help="An index: its folder, postgresql://…, qdrant://… or lance://…")]
DeviceOption = Annotated[str, typer.Option(help="Device to compute on: auto, cpu, cuda.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TestDataOption = Annotated[
    str | None, typer.Option(help="Another data set to test on, or the new location of the run's own.")
]
ConfigOption = Annotated[
    Path | None, typer.Option(help="TOML file of settings, such as settings.toml of a run; flags come first.")
]
MovedDataOption = Annotated[str | None, typer.Option(help="New location of the run's data set, if it was moved.")]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Stop with an error if an image would be left out, instead of counting it.")
]
MovedRunOption = Annotated[Path | None, typer.Option(help="Folder of the run that made the index, if it was moved.")]


class Commands(TyperGroup):
    """A group of commands whose help shows the whole first sentence of each, however narrow the terminal."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names of all commands with what they do."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class StoppedError(Exception):
    """A command was interrupted; the text says how to continue."""


@contextmanager
def resumable(command: str) -> Iterator[None]:
    """Turn an interrupt during a run into an error, that names the command to resume it."""
    from nearkin.training.run_opening import Interrupted

    try:
        yield
    except Interrupted as interrupt:
        if interrupt.folder is None:
            raise StoppedError("Stopped before training began: nothing was written.") from None
        resume = f"nearkin {command} --resume --out {shlex.quote(str(interrupt.folder))}"
        raise StoppedError(f"Stopped. To continue: {resume}") from None


_reporters: list[Reporter] = []  # of this command


def progress_reporter(*, strict: bool = False, silent: bool = False) -> Reporter:
    """Progress on standard error, so that standard output holds only results; with `silent` none."""
    return _remember(Reporter(None if silent else Console(stderr=True), strict=strict))


def output_reporter(*, strict: bool = False) -> Reporter:
    """Progress on standard output, for commands whose results are read by people."""
    return _remember(Reporter(Console(), strict=strict))


def _remember(reporter: Reporter) -> Reporter:
    _reporters.append(reporter)
    return reporter


def print_left_out() -> None:
    """Print on standard error which images this command has left out and why, if it has."""
    found = {path: reason for reporter in _reporters for path, reason in reporter.left_out.items()}
    _reporters.clear()
    if not found:
        return
    print(f"{counted(len(found), 'image', 'images')} left out:", file=sys.stderr)
    for reason in dict.fromkeys(found.values()):
        paths = [path for path, why in found.items() if why == reason]
        print(escape_name(f"  {len(paths):,} because {reason}: {listed(paths)}"), file=sys.stderr)


def with_plan_flags(command: Any) -> Any:
    """Give a command that takes `**settings` one flag per field of Plan; a flag that was not set is None."""
    signature = inspect.signature(command)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*parameters, *_plan_flags()])
    command.__annotations__ = {p.name: p.annotation for p in command.__signature__.parameters.values()}
    return command


def _plan_flags() -> list[inspect.Parameter]:
    hints, of_backbone = get_type_hints(Plan), backbone_settings(Plan.backbone)
    flags = []
    for field in dataclasses.fields(Plan):
        default = ",".join(field.default) if isinstance(field.default, tuple) else str(field.default)
        shown = field.metadata["shown"] or default
        shown += f"; {Plan.backbone}: {of_backbone[field.name]}" if field.name in of_backbone else ""
        names = [field.metadata["flag"]] if field.metadata["flag"] else []
        option = typer.Option(*names, help=field.metadata["help"], show_default=shown or "empty")
        hint = str if get_origin(hints[field.name]) is tuple else hints[field.name]
        annotation = Annotated[hint | None, option]  # type: ignore[valid-type]
        flags.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return flags


def changed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The plan flags that were set; those left out keep the default of plan or backbone."""
    return {name: value for name, value in settings.items() if value is not None}
