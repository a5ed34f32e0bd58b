"""`import paceline`, over what bare python takes to start; neither torch nor ray may be loaded by it."""

import sys
from collections.abc import Callable

from benchmarks.figures import MILLISECONDS, Figure, Row, judged
from benchmarks.processes import MeasurementError, run_process
from benchmarks.rounds import Effort

LIMIT_S = 0.06
CHECK = "; import sys; assert not {'torch', 'ray'} & set(sys.modules), 'torch or ray was loaded'"
OURS = {
    "import paceline": "import paceline" + CHECK,
    "from paceline import Trainer": "from paceline import Trainer" + CHECK,
}
PEERS = {
    "import torch": "import torch",
    "import accelerate": "import accelerate",
    "import lightning.fabric": "import lightning.fabric",
    "import ray.train": "import ray.train",
}


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    ours = _over_bare(OURS, 3 if effort.is_quick else 20, say)
    peers = _over_bare(PEERS, 1 if effort.is_quick else 3, say)
    return [
        Row(
            f"`{figure.system}`, over bare python, with neither torch nor ray loaded",
            MILLISECONDS,
            figure,
            peers if figure.system == "import paceline" else (),
            target=f"≤ {LIMIT_S * 1e3:.0f} ms" if figure.system == "import paceline" else "",
            is_met=judged(figure, lambda value: value <= LIMIT_S) if figure.system == "import paceline" else None,
        )
        for figure in ours
    ]


def _over_bare(statements: dict[str, str], num_rounds: int, say: Callable[[str], None]) -> tuple[Figure, ...]:
    """Each process is compared with a bare one that was started just before it."""
    samples: dict[str, list[float]] = {name: [] for name in statements}
    problems: dict[str, str] = {}
    for number in range(num_rounds):
        say(f"{', '.join(statements)}, round {number + 1} of {num_rounds}")
        for name, statement in statements.items():
            if name in problems:
                continue
            try:
                bare_s = _wall_s("pass")
                samples[name].append(_wall_s(statement) - bare_s)
            except MeasurementError as error:
                problems[name] = str(error)
    return tuple(Figure(name, tuple(samples[name]), problems.get(name)) for name in statements)


def _wall_s(statement: str) -> float:
    return run_process([sys.executable, "-c", statement]).wall_s
