"""How long the loop stands still for a 500 MB checkpoint, against a durable torch.save of the same state."""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import MILLISECONDS, Figure, Row, ratio_at_least
from benchmarks.marks import MARKS_FILE, read_marks
from benchmarks.processes import environment, run_process
from benchmarks.rounds import Effort
from benchmarks.systems import SCRIPTS


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    say("saving 500 MB, in turns with torch.save")
    marks = _run(num_saves=2 if effort.is_quick else 8)
    ours = Figure("Paceline", _seconds(marks, "paceline")[1:])
    durable = Figure("torch.save, flush, fsync", _seconds(marks, "torch_save")[1:])
    first = _seconds(marks, "paceline")[0]
    return [
        Row(
            "the loop stands still for a 500 MB checkpoint, from the second one on",
            MILLISECONDS,
            ours,
            (durable,),
            target="≤ 1/3 of a durable torch.save",
            is_met=ratio_at_least(MILLISECONDS, ours, durable, 3.0),
            note=f"the first one, which sets its memory aside: {MILLISECONDS.show(first)}",
        )
    ]


def _run(num_saves: int) -> list[dict]:
    folder = Path(tempfile.mkdtemp(prefix="checkpoints_"))
    try:
        marks_path = folder / "marks.jsonl"
        environ = environment(**{MARKS_FILE: str(marks_path), "PACELINE_RESULTS": str(folder / "runs")})
        spec = json.dumps({"num_saves": num_saves + 1, "folder": str(folder)})
        run_process([sys.executable, str(SCRIPTS / "save_checkpoints.py"), spec], environ, folder)
        return read_marks(marks_path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _seconds(marks: list[dict], name: str) -> tuple[float, ...]:
    return tuple(one["seconds"] for one in marks if one["name"] == name)
