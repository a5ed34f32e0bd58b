"""The app, with its verbs."""

from typing import Annotated

import typer

import paceline
from paceline.cli import data, run, train, xp
from paceline.cli.quick import QuickGroup

app = typer.Typer(
    name="paceline",
    cls=QuickGroup,
    help="Distributed training that feels like calling a function.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to load than all the rest
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


run.add_to(app)
train.add_to(app)
xp.add_to(app)
data.add_to(app)
