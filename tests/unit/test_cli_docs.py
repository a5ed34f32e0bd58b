"""The pages of command groups are what the program says, and every verb says how it is used."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

from paceline.cli.app import build

DOCS = Path(__file__).parents[2] / "docs"


def generator():
    spec = importlib.util.spec_from_file_location("generate_cli", DOCS / "generate_cli.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["train", "run", "xp", "data"])
def test_page_is_up_to_date(name):
    assert (DOCS / f"cli-{name}.md").read_text() == generator().page(name), "run python docs/generate_cli.py"


def command_lines():
    """Of all pages and of the help of all commands: what begins with the program's name."""
    texts = [page.read_text() for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]]
    fenced = [block for text in texts for block in re.findall(r"```(?:bash|text)\n(.*?)```", text, re.DOTALL)]
    lines = [line.strip() for block in fenced for line in block.splitlines()]
    inline = [code for text in texts for code in re.findall(r"`((?:paceline|mlx) [a-z][^`\n]*)`", text)]
    return sorted({one for one in [*lines, *inline] if re.match(r"(paceline|mlx) [a-z]", one) and "--help" not in one})


def is_known(program, line):
    """Whether the program takes it. Pipes, remarks and what help says beside an example end a line."""
    line = re.split(r" (?:&&|\||#)", re.sub(r"\$\(.*\)", "x", line))[0]
    _, *words = shlex.split(re.split(r"   +|  (?=[a-z])", line)[0].replace("…", ""))
    command, context = program, program.make_context("paceline", [words[0], "--help"], resilient_parsing=True)
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return False
        command = command.commands[words.pop(0)]
    try:
        given = command.make_context("x", words, parent=context).params.get("words") or [] if words else []
    except typer._click.exceptions.UsageError:
        return False
    return command.name == "run" or not [word for word in given if re.match(r"--|-[a-z]", word)]


def test_command_lines_of_the_documentation_exist():
    program = typer.main.get_command(build())
    lines = command_lines()
    assert len(lines) > 100
    assert not is_known(program, "paceline xp lst")
    assert not is_known(program, "paceline train bind --chek")
    assert not is_known(program, "paceline xp show --jsn")
    assert [line for line in lines if not is_known(program, line)] == []


def test_names_that_are_piped_to_a_verb_may_be_none():
    """Without -r, xargs calls it once without a name: that is the newest run."""
    piped = [line for line in command_lines() if "xargs" in line]
    assert len(piped) > 1
    assert [line for line in piped if not re.search(r"xargs -r -n1 paceline", line)] == []


def test_every_verb_has_examples_and_json():
    program = typer.main.get_command(build())
    assert set(generator().GROUPS) == {name for name, one in program.commands.items() if not one.hidden}
    for name in ("train", "xp", "data"):
        shown = {verb: command for verb, command in program.commands[name].commands.items() if not command.hidden}
        for verb, command in shown.items():
            assert f"  paceline {name} {verb}" in command.help, verb
            assert any("--json" in param.opts for param in command.params), verb
