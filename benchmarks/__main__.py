"""Measure Paceline beside its peers and print how they compare.

Every figure is measured for all systems in this one run, in turns, on two gloo workers with one thread each. The table
goes to the terminal and, with all samples, to a folder. Leave the machine alone meanwhile.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.figures import Row, failed_row
from benchmarks.machine import describe_machine
from benchmarks.rounds import FULL, QUICK, Effort
from benchmarks.rows import MODULES, Benchmark
from benchmarks.tables import print_table, save

RESULTS_DIR = Path(__file__).parent / "results"
EXAMPLES = """examples:
  python -m benchmarks                            everything, about 20 minutes
  python -m benchmarks --quick                    everything once: does it work? The figures mean little
  python -m benchmarks --only report,recovery     two of them
  python -m benchmarks --list                     what there is
"""


def main() -> int:
    args = _parser().parse_args()
    console = Console()
    if args.list:
        for name in MODULES:
            console.print(f"{name:<12}{Benchmark(name).summary}", markup=False, highlight=False, soft_wrap=True)
        return 0
    facts = describe_machine()
    for name, value in facts.items():
        console.print(f"{name:<15}{value}", markup=False, highlight=False, soft_wrap=True)
    rows = _measure(args.only, QUICK if args.quick else FULL, console)
    print_table(console, rows)
    is_whole = list(args.only) == list(MODULES) and not args.quick
    title = "Benchmarks" if is_whole else f"Benchmarks: {', '.join(args.only)}{', one quick round' if args.quick else ''}"
    for path in save(args.out, "benchmarks" if is_whole else "partial", rows, facts, title):
        console.print(f"saved {path}", markup=False, highlight=False, soft_wrap=True)
    return int(any(row.ours.value is None for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", type=_names, default=list(MODULES), metavar="A,B", help=f"some of: {', '.join(MODULES)}")
    parser.add_argument("--quick", action="store_true", help="one round each")
    parser.add_argument("--list", action="store_true", help="say what each benchmark measures, and end")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR, help="folder for the results (default: %(default)s)")
    return parser


def _names(text: str) -> list[str]:
    asked = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in asked if name not in MODULES]
    if unknown or not asked:
        raise argparse.ArgumentTypeError(f"no benchmark {', '.join(unknown) or text!r}; there are {', '.join(MODULES)}")
    return [name for name in MODULES if name in asked]


def _measure(names: Sequence[str], effort: Effort, console: Console) -> list[Row]:
    """A benchmark that fails becomes a row that says so; the others go on."""
    rows: list[Row] = []
    for name in names:
        benchmark = Benchmark(name)
        with console.status(name) as status:

            def say(text: str, name: str = name) -> None:
                status.update(f"{name}: {text}")  # noqa: B023 -- called only while this status is shown
                if not console.is_terminal:
                    print(f"{name}: {text}", flush=True)

            try:
                rows += benchmark.measure(effort, say)
            except Exception as error:
                rows.append(failed_row(benchmark.summary, error))
    return rows


if __name__ == "__main__":
    sys.exit(main())
