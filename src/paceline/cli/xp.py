"""`paceline xp`: runs, found again. The verbs are in the modules `xp_…`, a small group of them in each."""

import typer

from paceline.cli import xp_board, xp_compare, xp_control, xp_diff, xp_keep, xp_list, xp_logs, xp_show
from paceline.cli.asking import new_group

_HELP = """Find, read, compare, stop and remove runs.

\b
  paceline xp ls                     the last runs
  paceline xp show digits            the newest run of that name
  paceline xp logs digits 3          what run_003 prints
  paceline xp diff digits/2 digits/3

A run is said as NAME, NAME RUN or NAME/RUN; the beginning of a name is enough. `latest` and -1 are the newest run,
-2 the one before, @tag the newest with that tag.
"""


def add_to(app: typer.Typer) -> None:
    group = new_group("xp", _HELP)
    for module in (xp_list, xp_show, xp_logs, xp_compare, xp_diff, xp_control, xp_keep, xp_board):
        module.add_to(group)
    app.add_typer(group)
