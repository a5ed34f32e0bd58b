"""`python -m paceline.launch.torch_distributed [-n N] [--max-restarts N] [--] python3 train.py ARGS`

The same as `paceline run`, for entry points that name the interpreter. If that is the one that runs this, the script is
run in warm workers; any other command becomes a child of each of them. How many: -n, else the environment variable
PACELINE_SLOTS, else one for each GPU, else 1.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence

from paceline.errors import ArgumentError
from paceline.launch.launcher import Launch, program_of, refuse, run_to_exit_code
from paceline.launch.program import Command, Script
from paceline.launch.size import size_of

_PYTHON = re.compile(r"python(3(\.\d+)?)?")


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    words = given.command[1:] if given.command[:1] == ["--"] else given.command
    try:
        launch = Launch(num_workers=size_of(given.num_workers), max_restarts=given.max_restarts)
        program = named_by(words)
    except ArgumentError as error:
        return refuse(error)
    return run_to_exit_code(program, launch)


def named_by(words: Sequence[str]) -> Script | Command:
    """The script in `python3 [-u] train.py ARGS` or `python3 -m module ARGS`, for this very Python; `train.py ARGS`
    too. Else the command."""
    if words and words[0].endswith(".py"):
        return program_of(words)
    if words and _is_this_python(words[0]):
        rest = [*words[1:]]
        while rest[:1] == ["-u"]:  # output is passed on at once anyway
            del rest[0]
        if rest[:1] == ["-m"]:
            return program_of(rest[1:], is_module=True)
        if rest and not rest[0].startswith("-"):
            return program_of(rest)
    return program_of(words, no_python=True)


def _is_this_python(word: str) -> bool:
    found = shutil.which(word)
    if found is None or not _PYTHON.fullmatch(os.path.basename(word)):
        return False
    return os.path.realpath(os.path.dirname(found)) == os.path.realpath(os.path.dirname(sys.executable))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m paceline.launch.torch_distributed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-n", "--nproc-per-node", "--nproc_per_node", dest="num_workers", metavar="N")
    parser.add_argument("--max-restarts", "--max_restarts", type=int, default=Launch.max_restarts, metavar="N")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="python3 train.py ARGS, or any command")
    return parser


if __name__ == "__main__":
    sys.exit(main())
