"""Writes the pages of command groups, docs/cli-*.md, from the help of the program: python docs/generate_cli.py"""

from pathlib import Path
from typing import Any

import typer

from paceline.cli.app import build

DOCS = Path(__file__).parent
GROUPS = {
    "train": (
        "Experiments: `paceline train`",
        "What an experiment is, is told in [Typed experiments](experiments.md).",
    ),
    "run": (
        "The launcher: `paceline run`",
        "What it does with a script, and its exit codes, are told in [Launching scripts](launch.md).",
    ),
    "xp": ("Runs: `paceline xp`", "How these are used together is told in [Finding runs](finding-runs.md)."),
    "data": ("Storage: `paceline data`", "The storage is what `--root` or `PACELINE_STORAGE` names."),
}
EXIT_CODES = """| exit code | |
|---|---|
| 0 | done |
| 1 | the run failed, or was not clean |
| 2 | it cannot be done as it was asked |
| 3 | there is no such run, or nothing at that path |
| 124 | it did not come in time |
| 130 | Ctrl-C |
"""
WIDTH = 100


def page(name: str) -> str:
    title, about = GROUPS[name]
    program: Any = typer.main.get_command(build())
    group = program.commands[name]
    top = program.make_context("paceline", ["--help"], resilient_parsing=True)
    commands = getattr(group, "commands", None)
    sections = {name: group} if commands is None else {f"{name} {verb}": one for verb, one in commands.items()}
    verbs = [_section(f"paceline {words}", one, top) for words, one in sections.items() if not one.hidden]
    made = "This page is generated from the program's own help by `python docs/generate_cli.py`."
    return "\n".join([f"# {title}\n", f"{about} {made}\n", *([] if commands is None else [EXIT_CODES]), *verbs])


def _section(path: str, command: Any, top: Any) -> str:
    context = type(top)(
        command, info_name=path, help_option_names=["-h", "--help"], terminal_width=WIDTH, max_content_width=WIDTH
    )
    lines = [line.rstrip() for line in command.get_help(context).splitlines()]
    return "\n".join([f"## {path}", "```text", *lines, "```", ""])


if __name__ == "__main__":
    for one in GROUPS:
        (DOCS / f"cli-{one}.md").write_text(page(one))
