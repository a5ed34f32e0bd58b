"""The display that a run has by default, in a terminal and in a notebook."""

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from paceline.callbacks.base import Callback

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.callbacks.progress_view import Progress
    from paceline.checkpoints import CheckpointInfo

_FRAMES_PER_S = 10
_NOTEBOOK_INTERVAL_S = 0.25


def default_progress() -> Callback | None:
    """A ProgressCallback where somebody is looking: in a terminal or a notebook; None in a pipe or a file.

    `PACELINE_PROGRESS=0` and `=1` decide it otherwise.
    """
    wish = os.environ.get("PACELINE_PROGRESS", "").strip().lower()
    if wish in ("0", "false", "no", "off"):
        return None
    is_wished = wish in ("1", "true", "yes", "on")
    return ProgressCallback() if is_wished or _in_notebook() or _in_terminal() else None


class ProgressCallback(Callback):
    """Shows the run's name, time, steps and speed, rank 0's latest numbers, checkpoints and restarts.

    With `report_progress` it has a bar, a percentage and the time left. In an elastic run it shows how many workers
    there are, and how many there were. Lines that workers have not finished yet, such as progress bars of their own,
    stand below, one for each rank. It ends as one line that says how the run ended and where its folder is. In a
    terminal, what is printed meanwhile appears above the display. Taking a result only stores it; drawing happens at
    most ten times a second.
    """

    def __init__(self, console: "Console | None" = None):
        self._console = console
        self._progress: Progress | None = None
        self._screen: _Screen | None = None

    def start_training(self, logdir: str, config: dict[str, Any], **info: Any) -> None:
        from paceline.callbacks.progress_view import Progress, ProgressView

        self._progress = Progress(logdir, int(info.get("world_size") or 1))
        view = ProgressView(self._progress)
        on_notebook = self._console is None and _in_notebook()
        self._screen = _NotebookScreen(view) if on_notebook else _TerminalScreen(view, self._console)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        progress, screen = self._progress, self._screen
        if progress is None or screen is None:
            return
        progress.latest = results[0]
        progress.num_steps += 1
        screen.touch()

    def handle_checkpoint(self, checkpoint: "CheckpointInfo", **info: Any) -> None:
        if self._progress is not None and self._screen is not None:
            self._progress.last_checkpoint_step = checkpoint.iteration
            self._progress.num_checkpoints += 1
            self._screen.touch()

    def handle_restart(self, attempt: int, reason: str, **info: Any) -> None:
        if self._progress is not None and self._screen is not None:
            if info.get("cause") != "growth":  # that is no failure, and handle_resize tells it
                self._progress.num_restarts += 1
            self._progress.first_done = None  # it may go on from an earlier point, at another speed
            self._screen.touch()

    def handle_resize(self, world_size: int, **info: Any) -> None:
        if self._progress is not None and self._screen is not None:
            if self._progress.num_steps:  # before that, it is the size with which the run begins
                self._progress.former_sizes.append(self._progress.num_workers)
            self._progress.num_workers = world_size
            self._screen.touch()

    def show_unfinished(self, lines: Mapping[int, str]) -> None:
        """What workers have printed of lines that are not finished yet: their own progress bars, say."""
        if self._progress is not None and self._screen is not None:
            self._progress.unfinished = dict(lines)
            self._screen.touch()

    def show_progress(self, done: float) -> None:
        """How much of the run is done, from 0 to 1, as `report_progress` tells it."""
        if self._progress is not None and self._screen is not None:
            self._progress.tell_done(done)
            self._screen.touch()

    def finish_training(self, error: bool = False, **info: Any) -> None:
        progress, screen = self._progress, self._screen
        self._progress = self._screen = None
        if progress is None or screen is None:
            return
        progress.status = str(info.get("status", "FAILED" if error else "SUCCEEDED"))
        exception = info.get("exception")
        progress.problem = type(exception).__name__ if exception is not None and error else ""
        progress.ended_s = time.monotonic()
        screen.close()


class _Screen(Protocol):
    """Where frames appear. `touch` says that there is news; it must be cheap."""

    def touch(self) -> None: ...

    def close(self) -> None: ...


class _TerminalScreen:
    """rich's Live: draws in its own thread, and lets what is printed meanwhile appear above."""

    def __init__(self, view: Any, console: "Console | None"):
        from rich.console import Console
        from rich.live import Live

        # A console of its own, on today's sys.stdout: rich's global one may belong to a stream that is gone.
        self._live = Live(view, console=console or Console(), refresh_per_second=_FRAMES_PER_S, transient=False)
        self._live.start(refresh=True)

    def touch(self) -> None:
        pass  # the thread draws anyway

    def close(self) -> None:
        self._live.stop()
        if not self._live.console.is_terminal:  # rich ends the line in a terminal only
            self._live.console.line()


class _NotebookScreen:
    """One output cell that is updated in place. Draws in the caller's thread, a few times a second.

    Not rich's Live: in a notebook that needs ipywidgets, and without them says so instead of showing
    anything.
    """

    def __init__(self, view: Any):
        from IPython.display import display

        self._view = view
        self._drawn_s = time.monotonic()
        publish: Any = display  # IPython is not typed
        self._handle = publish(self._frame(), raw=True, display_id=True)

    def touch(self) -> None:
        if time.monotonic() - self._drawn_s >= _NOTEBOOK_INTERVAL_S:
            self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        if self._handle is not None:  # no display system after all, as in a bare IPython shell
            self._handle.update(self._frame(), raw=True)

    def _frame(self) -> dict[str, str]:
        """HTML for the notebook, text for everything that reads its file."""
        from io import StringIO

        from rich.console import Console

        console = Console(file=StringIO(), record=True, width=110, force_jupyter=False, force_terminal=True)
        console.print(self._view)
        pre = '<pre style="margin:0;line-height:1.4;font-family:monospace">{code}</pre>'
        html = console.export_html(inline_styles=True, code_format=pre, clear=False)
        return {"text/html": html, "text/plain": console.export_text()}


def _in_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # no stdout at all, or a closed one
        return False


def _in_notebook() -> bool:
    """Is this an IPython kernel? Answered without importing IPython: a kernel has done that itself."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
