"""How long the loop stands still for a 500 MB checkpoint, against a durable torch.save of the same state."""

from collections.abc import Callable

from benchmarks.figures import MILLISECONDS, Figure, Row, ratio_at_least
from benchmarks.marks import Mark
from benchmarks.rounds import Effort
from benchmarks.systems import run_script


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    say("saving 500 MB, in turns with torch.save")
    marks = run_script("save_checkpoints.py", num_saves=3 if effort.is_quick else 9).marks
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


def _seconds(marks: list[Mark], name: str) -> tuple[float, ...]:
    return tuple(one["seconds"] for one in marks if one["name"] == name)
