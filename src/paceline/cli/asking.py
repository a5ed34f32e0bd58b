"""What verbs share: which run is meant, how an answer is given, and with which exit code it ends.

    0    done                                   3    there is no such run
    1    the run that was asked about failed    124  it did not come in time
    2    it cannot be done as it was asked      130  Ctrl-C

Data goes to stdout, words about it to stderr.
"""

import atexit
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from paceline.cli import streams
from paceline.cli.quick import QuickCommand, QuickGroup
from paceline.no_collection import no_collection

OK, FAILED, USAGE, NOT_FOUND, TIMED_OUT, INTERRUPTED = 0, 1, 2, 3, 124, 130

Verb = TypeVar("Verb", bound=Callable[..., Any])


def complete_runs(incomplete: str) -> list[str]:
    """For the shell: names of runs, and of their folders."""
    names = _names()
    every = dict.fromkeys(["latest", *(name.rpartition("/")[0] or name for name in names), *names])
    return [name for name in every if name.startswith(incomplete) and name.isprintable()][:200]


def complete_states(incomplete: str) -> list[str]:
    """For the shell: what `xp ls --state` takes."""
    from paceline.runs.status import RunState

    return [state for state in RunState if state.startswith(incomplete)]


def complete_words(ctx: Any, incomplete: str) -> list[str]:
    """The same for NAME RUN: after a name, what its runs are called."""
    words = ctx.params.get("words") or []
    if not words:
        return complete_runs(incomplete)
    inside = [name.rpartition("/") for name in _names()]
    runs = dict.fromkeys(["latest", *(run for name, _, run in inside if name == words[0])])
    return [run for run in runs if len(words) == 1 and run.startswith(incomplete) and run.isprintable()][:200]


def _names() -> list[str]:
    try:
        from paceline.runs.index import find_runs

        return [run.name for run in find_runs(tell=lambda text: None)]
    except Exception:  # a shell that is being typed into must not be disturbed
        return []


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME] [RUN]",
        show_default=False,
        autocompletion=complete_words,
        help="The run: a name or its beginning, NAME RUN, NAME/RUN, latest, -2, @tag. Default: the newest.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Root = Annotated[
    str | None,
    typer.Option("--root", envvar="PACELINE_STORAGE", metavar="DIR", show_default=False, help="The storage."),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        "--ray-address",
        metavar="ADDRESS",
        show_default=False,
        help="Of a Ray cluster: http://HOST:8265, HOST:6379 or auto. Default: RAY_ADDRESS.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def new_group(name: str, help: str) -> typer.Typer:
    return typer.Typer(name=name, cls=QuickGroup, help=help, no_args_is_help=True, rich_markup_mode=None)


def add_command(group: typer.Typer, name: str, help: str, verb: Callable[..., Any], **settings: Any) -> None:
    group.command(name, cls=QuickCommand, help=help, **settings)(answering(verb))


def add_verb(group: typer.Typer, name: str, help: str, verb: Callable[..., Any], **settings: Any) -> None:
    """One that takes the words for a run: `-1` is a run, not an option that nobody knows."""
    add_command(group, name, help, verb, context_settings={"ignore_unknown_options": True}, **settings)


def answering(verb: Verb) -> Verb:
    """The verb, whose errors become a line on stderr and an exit code."""

    @functools.wraps(verb)
    def answered(*args: Any, **kwargs: Any) -> Any:
        from paceline.errors import PacelineError, RunNotFoundError

        try:
            return verb(*args, **kwargs)
        except RunNotFoundError as error:
            say(str(error))
            raise typer.Exit(NOT_FOUND) from None
        except PacelineError as error:
            say(str(error))
            raise typer.Exit(USAGE) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `| head` has seen enough
            streams.mute()
            raise typer.Exit(OK) from None
        except OSError as error:  # a disk that is full, a folder of somebody else
            tell_refusal(error)
            raise typer.Exit(USAGE) from None

    return answered  # type: ignore[return-value]


def tell_refusal(error: OSError) -> None:
    say(f"It cannot be done: {error.strerror or error}{f': {error.filename}' if error.filename else ''}.")
    streams.mute()


def say(text: str) -> None:
    """To who types, not to who reads the data."""
    from paceline.cli.drawing import clean

    try:
        for line in text.splitlines() or [""]:
            print(clean(line), file=sys.stderr, flush=True)
    except OSError:  # nobody reads it any more, or a full disk: what was asked for is done all the same
        streams.mute()


def give(lines: Iterable[str]) -> None:
    """They are clean."""
    for line in lines:
        print(line)
    sys.stdout.flush()


def give_json(value: Any) -> None:
    from paceline.cli.drawing import clean_json
    from paceline.json_text import encode_document

    print(clean_json(encode_document(value).decode()), end="", flush=True)


def pick_anywhere(words: Sequence[str] | None, address: str | None, several: bool = False) -> list[Any]:
    """What `Store` picks; of runs on a cluster that is named, whose folders are not here, a ClusterRun."""
    if address is None and not os.environ.get("RAY_ADDRESS"):
        return Store().pick_all(words) if several else [Store().pick(words)]
    from paceline.cli import cluster_runs  # which loads much

    return cluster_runs.pick_anywhere(Store(), words, address, several)


class Store:
    """The runs below the results folder."""

    def __init__(self) -> None:
        from paceline.runs.index import find_runs
        from paceline.runs.index_file import IndexFile
        from paceline.runs.logdir import results_dir

        self.root: Path = results_dir()
        self.cache = IndexFile(self.root)
        # Tens of thousands of small values, and no cycle among them: there is nothing for the collector to find, now or
        # at the exit, and its search would take as long as to read the index.
        atexit.register(gc.freeze)
        with no_collection():
            self.runs = find_runs(self.root, cache=self.cache, tell=say)

    def tags_of(self, name: str) -> frozenset[str]:
        from paceline.runs.tags import read_tags

        return read_tags(self.root / name)

    def pick(self, words: Sequence[str] | None) -> Any:
        """The `Found` that is meant, here or, by a path, elsewhere."""
        words = list(words or [])
        if len(words) == 1 and words[0].startswith(("/", "./", "../", "~")):
            return found_at(words[0])
        from paceline.runs.selection import select_one

        name = select_one(words, self._names(), self.tags_of)
        return next(run for run in self.runs if run.name == name)

    def pick_all(self, words: Sequence[str] | None) -> list[Any]:
        """The same, of a glob or a tag all."""
        from paceline.runs.selection import select

        words = list(words or [])
        if len(words) == 1 and words[0].startswith(("/", "./", "../", "~")):
            return [found_at(words[0])]
        names = set(select(words, self._names(), self.tags_of))
        return [run for run in self.runs if run.name in names]

    def _names(self) -> list[str]:
        """Newest first; those at last in which no run has begun, so that nobody means them by `latest`."""
        return [run.name for run in sorted(self.runs, key=_is_shell)]

    def pick_each(self, words: Sequence[str]) -> list[Any]:
        """Each word means a run, or several; each run once."""
        found = {run.path: run for word in words for run in self.pick_all([word])}
        return list(found.values())


def _is_shell(run: Any) -> bool:
    """A folder without a status that can be read, which is the first thing that a run writes: its driver was killed at
    once, or it is none."""
    if run.started is not None:
        return False
    from paceline.errors import RunDamagedError
    from paceline.runs.durable import read_json
    from paceline.runs.status import RunStatus

    try:
        return RunStatus.from_fields(read_json(Path(run.path, "status.json")) or {}) is None
    except RunDamagedError:
        return True


def found_at(path: str) -> Any:
    """The `Found` of a run folder anywhere."""
    from paceline.runs.index import Found
    from paceline.runs.load import load_run
    from paceline.runs.logdir import results_dir

    run = load_run(path)
    status, root = run.status, results_dir()
    name = str(run.path.relative_to(root)) if run.path.is_relative_to(root) and run.path != root else run.name
    return Found(name, str(run.path), status.state, status.created, status.started, status.ended)


def confirm(question: str, yes: bool) -> bool:
    """Asked on stderr. Where nobody can answer, it is a no."""
    if yes:
        return True
    if not sys.stdin.isatty():
        say(f"{question} Nobody is there to answer: say --yes.")
        return False
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:  # Ctrl-C, or Ctrl-D
        print(file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
