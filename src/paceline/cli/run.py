"""`paceline run`: a script, as it is, on many workers."""

from typing import Annotated

import typer

_HELP = """Run a script on many workers, with the environment that torchrun would give it.

\b
  paceline run -n 4 train.py --lr 0.1          a script, on 4 workers
  paceline run -n 2:4 train.py                 as many as there is room for, from 2 to 4
  paceline run -n 4 -m package.train           a module
  paceline run -n 4 --no-python ./train.sh     any command
  paceline run -n 8 --engine ray train.py      on the Ray cluster at RAY_ADDRESS

A worker that is killed costs a restart of all; paceline.report, save_checkpoint, load_checkpoint and should_stop work
in the script. What follows the script's name is the script's.
"""

# Options of torchrun's that have nothing to say here: known, so that who brings them hears what to do.
_MEETING = ["rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "master-addr", "master-port", "node-rank"]
_OUTPUT = ["log-dir", "redirects", "tee"]


def _names(options: list[str]) -> list[str]:
    return [f"--{name}" for option in options for name in dict.fromkeys((option, option.replace("-", "_")))]


def run(
    words: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]", show_default=False, help="The script, and what it gets.")
    ],
    num_workers: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--nproc-per-node",
            "--nproc_per_node",
            metavar="N",
            show_default=False,
            help="How many workers: 4, or 2:4, or gpu, cpu, auto. Default: one for each GPU, else 1.",
        ),
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", "--no_python", help="SCRIPT is a command, a child of each worker.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", "--max_restarts", help="How often workers may be lost; -1: always."),
    ] = 3,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="local|ray",
            show_default=False,
            help="Default: Ray if RAY_ADDRESS is HOST:PORT or auto, else local.",
        ),
    ] = None,
    logdir: Annotated[
        str | None,
        typer.Option(show_default=False, help="Folder of the run; relative: below the results folder."),
    ] = None,
    cpus_per_worker: Annotated[float | None, typer.Option(metavar="X", show_default=False)] = None,
    gpus_per_worker: Annotated[
        float, typer.Option(metavar="X", help="GPUs that are reserved for a worker. 0: all see all of them.")
    ] = 0,
    grace_s: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", help="To save and return, after Ctrl-C or SIGTERM.")
    ] = 30,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE", show_default=False, help="Imported once, before workers are forked; repeatable."
        ),
    ] = None,
    standalone: Annotated[bool, typer.Option("--standalone", help="Nothing: it is always so.")] = False,
    num_nodes: Annotated[str, typer.Option("--nnodes", hidden=True, help="Accepted if it is 1.")] = "1",
    meeting: Annotated[str | None, typer.Option(*_names(_MEETING), hidden=True)] = None,
    output: Annotated[str | None, typer.Option(*_names(_OUTPUT), "-r", "-t", hidden=True)] = None,
    interval: Annotated[str | None, typer.Option(*_names(["monitor-interval"]), hidden=True)] = None,
) -> None:
    from paceline.errors import ArgumentError
    from paceline.launch.launcher import Launch, program_of, refuse, run_to_exit_code
    from paceline.launch.size import size_of

    try:
        if num_nodes not in ("1", "1:1"):
            raise ArgumentError(f"--nnodes {num_nodes}: for more than one machine, say --engine ray -n NUMBER.")
        _refuse_torchruns(meeting, output, interval)
        program = program_of(words, is_module=is_module, no_python=no_python)
        launch = Launch(
            num_workers=size_of(num_workers),
            max_restarts=max_restarts,
            engine=engine,
            logdir=logdir,
            cpus_per_worker=cpus_per_worker,
            gpus_per_worker=gpus_per_worker,
            grace_s=grace_s,
            preload=tuple(preload or ()),
        )
    except ArgumentError as error:
        raise typer.Exit(refuse(error)) from None
    raise typer.Exit(run_to_exit_code(program, launch))


def _refuse_torchruns(meeting: str | None, output: str | None, interval: str | None) -> None:
    from paceline.errors import ArgumentError

    if meeting is not None:
        raise ArgumentError(
            f"Leave out {', '.join(f'--{option}' for option in _MEETING)}: workers on one machine find each other. "
            "On several machines, say --engine ray."
        )
    if output is not None:
        raise ArgumentError(
            f"Leave out {', '.join(f'--{option}' for option in _OUTPUT)}: each rank's output is in the run folder and "
            "on the terminal. --logdir says where the run folder is."
        )
    if interval is not None:
        raise ArgumentError("Leave out --monitor-interval: the end of a worker is noticed when it happens.")


def add_to(app: typer.Typer) -> None:
    # Options end at the script's name: what follows is the script's, --help as well.
    app.command("run", help=_HELP, context_settings={"allow_interspersed_args": False})(run)
