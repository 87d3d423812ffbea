"""The command line: one module per group of commands. An error is one sentence and exit code 2."""

import difflib
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer

from nearkin import ranks
from nearkin.cli import benchmark, search, studies, training
from nearkin.cli.options import Commands, StoppedError, print_left_out
from nearkin.errors import NearkinError
from nearkin.files import VERSION

# Typer brings its own copy of click or not, depending on its version: find the exception among its bases.
ClickException: type[Any] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

INTERRUPTED = 130
"""The exit code after Ctrl-C; typer itself may turn the interrupt into it."""

app = typer.Typer(
    cls=Commands,
    help="Deep metric learning: train embedding models, measure them on unseen classes, search with them.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for group in (training, benchmark, studies, search):
    app.add_typer(group.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"nearkin {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Deep metric learning: train embedding models, measure them on unseen classes, search with them."""


def main() -> None:
    """Run the command line; wrong input is one sentence on standard error and exit code 2."""
    _print_any_text()
    try:
        _join_ranks()
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        print_left_out()
        sys.stdout.flush()
        if ranks.leave():  # a thread of the group that outlives Python would end this process by an abort
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 0)
    except ranks.ToldError:
        sys.exit(2)
    except NearkinError as error:
        _fail(str(error))
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        _drop_output()
        sys.exit(1)  # as typer does
    except OSError as error:
        _drop_output()
        what = f"{error.strerror or error}: {error.filename}" if error.filename else f"Cannot write ({error.strerror})"
        _fail(f"{what}; choose another path, or make room.")
    except ClickException as error:
        _fail(_flag_hint(error) or " ".join(error.format_message().split()))
    except StoppedError as stopped:
        if ranks.is_first():
            print(f"nearkin: {stopped}", file=sys.stderr)
        ranks.leave()  # all stop together
        sys.exit(INTERRUPTED)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("nearkin: Stopped. Run the same command again to continue.", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


WITH_RANKS = {"train", "cv", "ship", "eval"}
"""Commands that several processes, started by torchrun, do together."""


def _join_ranks() -> None:
    """Join the processes that torchrun started, of which only the first one prints results."""
    ranks.join()
    if ranks.size() > 1 and (command := " ".join(sys.argv[1:2])) not in WITH_RANKS:
        raise NearkinError(f"nearkin {command} runs as one process: start it without torchrun.")
    if not ranks.is_first():
        _drop_output()


def _print_any_text() -> None:
    """Show signs that the terminal's encoding lacks by their codes, as in the locale C, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        lenient = stream.encoding.lower() == "utf-8" and stream.errors == "surrogateescape"
        if isinstance(stream, TextIOWrapper) and not lenient:
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Let Python write the rest of the output nowhere when it ends."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _flag_hint(error: Any) -> str:
    """Return a sentence on an unknown flag that names the nearest one, by its name or by its help; else nothing."""
    unknown, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if unknown is None or context is None:
        return ""
    flags = {name: option for option in context.command.params for name in option.opts if name.startswith("--")}
    close = difflib.get_close_matches(unknown, flags, n=1)
    if not close:
        said = unknown.strip("-").replace("-", " ").lower()
        found = {name: _help_of(option).find(said) for name, option in flags.items()}
        close = sorted((name for name, place in found.items() if place >= 0), key=lambda name: found[name])
    hint = f"Did you mean {close[0]}?" if close else f"See {context.command_path} --help."
    return f"There is no flag {unknown}. {hint}"


def _help_of(option: Any) -> str:
    return (getattr(option, "help", None) or "").replace("-", " ").lower()


def _fail(sentence: str) -> NoReturn:
    print(f"nearkin: {sentence}", file=sys.stderr)
    sys.exit(2)
