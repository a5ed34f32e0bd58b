"""Which run of a tracker belongs to a run folder, so that the driver that resumes it goes on with the same one."""

from pathlib import Path
from typing import Any

from paceline.callbacks.selection import WorkerSelection
from paceline.callbacks.tail_file import TailFile
from paceline.json_text import decode, encode_document

_FILENAME = "tracked_runs.json"


class TrackedRun:
    """The id that a tracker gave, kept in `tracked_runs.json` of the run folder.

    `selection` and `place`, where in the tracker the run is, tell one callback from another: one that is given
    again with other arguments begins a run of its own.
    """

    def __init__(self, run_dir: str, tracker: str, selection: WorkerSelection, *place: str | None):
        self._path = Path(run_dir) / _FILENAME
        ranks = [f"rank {rank}" for rank in selection.ranks or ()]
        self._name = ", ".join([tracker, *ranks, *(part for part in place if part)])

    def id(self) -> str | None:
        """None if no earlier driver has kept one."""
        kept = self._read().get(self._name)
        return kept if isinstance(kept, str) else None

    def keep(self, run_id: str) -> None:
        """From now on, also after a crash. The other callbacks' ids stay."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = encode_document({**self._read(), self._name: run_id})
        beside = TailFile(self._path.with_name(f".{_FILENAME}.tmp"), content)
        try:
            beside.move_to(self._path)
        finally:
            beside.close()

    def _read(self) -> dict[str, Any]:
        kept = decode(self._path.read_bytes()) if self._path.exists() else None
        return kept if isinstance(kept, dict) else {}
