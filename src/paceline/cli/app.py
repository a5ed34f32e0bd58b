"""The app, with its verbs."""

from importlib import import_module
from typing import Annotated

import typer

import paceline
from paceline.cli.quick import QuickGroup

_GROUPS = ("run", "train", "xp", "data")


def build(word: str | None = None) -> typer.Typer:
    """`word` is the first of a command line: if it names a group of verbs, no other is loaded, and it starts sooner."""
    app = typer.Typer(
        name="paceline",
        cls=QuickGroup,
        help="Distributed training that feels like calling a function.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich takes longer to load than all the rest
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in [word] if word in _GROUPS else _GROUPS:
        import_module(f"paceline.cli.{name}").add_to(app)
    return app


def _tell_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
