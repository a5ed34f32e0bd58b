"""`xp board` and `xp ray`: what others show of runs, TensorBoard and Ray."""

from typing import Annotated

import typer

from paceline.cli.asking import Address, Json, Store, Words, add_verb, complete_runs, give, give_json, say

_BOARD = """Show a run in TensorBoard, live, until Ctrl-C.

\b
  paceline xp board                     the newest run
  paceline xp board digits 3
  paceline xp board --with digits/2 --with digits/3 digits/4 --no-browser

It listens on 127.0.0.1 only, on a free port. A run that has written nothing for TensorBoard is shown by its
reports.
"""
_RAY = """Show the dashboard and the jobs of a Ray cluster.

\b
  paceline xp ray
  paceline xp ray --address http://127.0.0.1:8265

The cluster is that of --address, of RAY_ADDRESS, or one that runs on this machine. If it asks for a token:
RAY_AUTH_MODE=token, with the token in RAY_AUTH_TOKEN or in ~/.ray/auth_token.
"""


def board(
    words: Words = None,
    others: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="RUN", autocompletion=complete_runs, help="Another run beside it; repeatable."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it.")] = True,
    json: Json = False,
) -> None:
    import importlib.util

    from paceline.errors import MissingDependencyError

    for package in ("tensorboard", "tensorboardX"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(package, "tensorboard", "xp board")
    from paceline.cli.tensorboard_page import Page

    store = Store()
    found = [store.pick(words), *(store.pick([one]) for one in others or [])]
    with Page({run.name: run.run for run in found}, port) as page:
        if json:
            give_json({"url": page.url, "runs": [run.name for run in found]})
        else:
            give([page.url])
        say(f"TensorBoard shows {', '.join(run.name for run in found)}. Ctrl-C ends it.")
        if browser:
            import webbrowser

            webbrowser.open(page.url)
        page.serve()


def ray(
    address: Address = None,
    json: Json = False,
) -> None:
    from paceline.cli import drawing
    from paceline.cli.ray_cluster import Cluster

    cluster = Cluster(address)
    jobs = cluster.jobs()
    if json:
        give_json({"dashboard": cluster.url, "jobs": [vars(job) for job in jobs]})
        return
    give([f"dashboard  {drawing.clean(cluster.url)}"])
    if not jobs:
        say("There are no jobs.")
        return
    columns = [
        drawing.Column("job"),
        drawing.Column("state"),
        drawing.Column("took", rank=1, is_right=True),
        drawing.Column("command", rank=2),
        drawing.Column("said", rank=3),
    ]
    rows = [
        [
            drawing.clean(job.id),
            job.state,
            drawing.span(job.duration_s),
            drawing.clean(job.command),
            drawing.clean(job.said),
        ]
        for job in jobs
    ]
    give(["", *drawing.table(columns, rows, drawing.width(), {1: drawing.STATE_COLOURS}, drawing.is_coloured())])


def add_to(group: typer.Typer) -> None:
    add_verb(group, "board", _BOARD, board)
    add_verb(group, "ray", _RAY, ray)
