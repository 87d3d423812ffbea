"""The command line: one module per group of commands. An error is one sentence and exit code 2."""

import sys
from typing import Annotated, Any, NoReturn

import typer

from nearkin.cli import benchmark, search, studies, training
from nearkin.errors import NearkinError
from nearkin.files import VERSION

# Typer brings its own copy of click or not, depending on its version: find the exception among its bases.
ClickException: type[Any] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

INTERRUPTED = 130
"""The exit code after Ctrl-C; typer itself may turn the interrupt into it."""

app = typer.Typer(
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
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except NearkinError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename or 'a file'}; choose another path.")
    except ClickException as error:
        _fail(" ".join(error.format_message().split()))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        print(
            "nearkin: Stopped. Run the same command again to continue; resume a training run with nearkin train "
            "--resume --out FOLDER.",
            file=sys.stderr,
        )
    sys.exit(code if isinstance(code, int) else 0)


def _fail(sentence: str) -> NoReturn:
    print(f"nearkin: {sentence}", file=sys.stderr)
    sys.exit(2)
