"""Measure Paceline beside its peers and print how they compare.

Every figure is measured for all systems in this one run, in turns, on two gloo workers with one thread each. The table
goes to the terminal and, with all samples, to a folder. Leave the machine alone meanwhile.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.status import Status

from benchmarks.figures import Row, failed_row
from benchmarks.machine import describe_machine
from benchmarks.rounds import FULL, QUICK
from benchmarks.rows import MODULES, Benchmark
from benchmarks.tables import print_table, save

RESULTS_DIR = Path(__file__).parent / "results"
EXAMPLES = """examples:
  python -m benchmarks                            everything, more than an hour
  python -m benchmarks --quick                    everything once: does it work? The figures mean little
  python -m benchmarks --only report,recovery     two of them
  python -m benchmarks --list                     what there is
"""


def main() -> int:
    args = _parser().parse_args()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if args.list:
        for name in MODULES:
            console.print(f"{name:<16}{Benchmark(name).summary}")
        return 0
    is_whole = args.only == list(MODULES) and not args.quick
    stem = "benchmarks" if is_whole else "partial"
    args.out.mkdir(parents=True, exist_ok=True)
    facts = describe_machine()
    for name, value in facts.items():
        console.print(f"{name:<15}{value}")
    rows: list[Row] = []
    for name in args.only:
        rows += _measure(name, args, stem, console)
        paths = save(args.out, stem, rows, facts, _title(args))  # after each: an hour's work is not lost to a Ctrl-C
    print_table(rows)
    for path in paths:
        console.print(f"saved {path}")
    return int(any(row.ours.value is None for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", type=_names, default=list(MODULES), metavar="A,B", help=f"some of: {', '.join(MODULES)}"
    )
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


def _title(args: argparse.Namespace) -> str:
    parts = [] if args.only == list(MODULES) else [", ".join(args.only)]
    return ": ".join(["Benchmarks", *parts]) + (" (one quick round)" if args.quick else "")


def _measure(name: str, args: argparse.Namespace, stem: str, console: Console) -> list[Row]:
    """A benchmark that fails becomes a row that says so; the others go on."""
    benchmark = Benchmark(name)
    with console.status(name) as status:
        say = _teller(name, console, status)
        try:
            rows = benchmark.measure(QUICK if args.quick else FULL, say)
        except Exception as error:
            return [failed_row(benchmark.summary, error)]
    picture = args.out / f"{stem}-{name}.png"
    if benchmark.draw(rows, picture):
        console.print(f"saved {picture}")
    return rows


def _teller(name: str, console: Console, status: Status) -> Callable[[str], None]:
    """In a terminal one line that changes, in a pipe a line each."""

    def say(text: str) -> None:
        if console.is_terminal:
            status.update(f"{name}: {text}")
        else:
            console.print(f"{name}: {text}")

    return say


if __name__ == "__main__":
    sys.exit(main())
