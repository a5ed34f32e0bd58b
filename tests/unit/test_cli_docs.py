"""The pages of command groups are what the program says, and every verb says how it is used."""

import importlib.util
from pathlib import Path

import pytest
import typer

from paceline.cli.app import app

DOCS = Path(__file__).parents[2] / "docs"


def generator():
    spec = importlib.util.spec_from_file_location("generate_cli", DOCS / "generate_cli.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["train", "run", "xp", "data"])
def test_page_is_up_to_date(name):
    assert (DOCS / f"cli-{name}.md").read_text() == generator().page(name), "run python docs/generate_cli.py"


def test_every_verb_has_examples_and_json():
    program = typer.main.get_command(app)
    assert set(generator().GROUPS) == {name for name, one in program.commands.items() if not one.hidden}
    for name in ("train", "xp", "data"):
        for verb, command in program.commands[name].commands.items():
            assert f"  paceline {name} {verb}" in command.help, verb
            assert any("--json" in param.opts for param in command.params), verb
