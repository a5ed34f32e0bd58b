"""The documentation is true: its code runs, prints what the page says it prints, and names what exists."""

import ast
import difflib
import inspect
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FENCES = {"", "bash", "diff", "json", "python", "python no-run", "text"}


@dataclass(frozen=True)
class Block:
    """What stands between two fences, and the number of its first line on the page."""

    fence: str
    first_line: int
    lines: tuple[str, ...]

    @property
    def text(self):
        return textwrap.dedent("\n".join(self.lines)) + "\n"


def blocks(page):
    found, fence, start = [], None, 0
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        if fence is None:
            fence, start = line.strip().removeprefix("```"), number + 1
        else:
            found.append(Block(fence, start, tuple(lines[start - 1 : number - 1])))
            fence = None
    assert fence is None, f"{page.name}: the block that begins before line {start} has no end"
    return found


def runnable(page):
    return [block for block in blocks(page) if block.fence == "python"]


def program(page):
    """The page's code, each line at the number it has on the page: a traceback then points there."""
    lines = [""] * len(page.read_text().splitlines())
    for block in runnable(page):
        lines[block.first_line - 1 : block.first_line - 1 + len(block.lines)] = block.text.splitlines()
    return "\n".join(lines)


def shown_output(page):
    return [line.removeprefix("# → ") for line in program(page).splitlines() if line.startswith("# → ")]


def name_of(page):
    return str(page.relative_to(ROOT))


ON_A_CLUSTER = [ROOT / "docs/datasets.md", ROOT / "docs/tune.md"]
"""Pages that connect to Ray as their readers have it. Others start what they need."""


OF_THEIR_OWN = {"lightning", "ray"}
READER_OF = {"jax": "jax", "sklearn": "torch", "tensorflow": "tensorflow", "torch": "torch"}
"""By what a page imports. Pages with torch bring scikit-learn too."""


def reader_of(page, readers):
    """The one that reads it with others of its framework, unless it imports what changes a process for good."""
    nodes = list(ast.walk(ast.parse(program(page))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    known = {READER_OF[name.split(".")[0]] for name in names if name.split(".")[0] in READER_OF}
    return readers[known.pop()].run if len(known) == 1 and not names & OF_THEIR_OWN else run_alone


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page) and page not in ON_A_CLUSTER], ids=name_of)
def test_page_runs_and_prints_what_it_shows(page, readers, tmp_path):
    check_output(page, reader_of(page, readers), tmp_path)


@pytest.mark.parametrize("page", ON_A_CLUSTER, ids=name_of)
def test_page_runs_on_a_cluster_and_prints_what_it_shows(page, ray_cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.get_runtime_context().gcs_address)
    check_output(page, run_alone, tmp_path)


def run_alone(script, cwd):
    return subprocess.run([sys.executable, script], cwd=cwd, capture_output=True, text=True, timeout=150)


def check_output(page, run, tmp_path):
    script = tmp_path / f"{page.stem.replace('-', '_').lower()}_page.py"
    script.write_text(program(page))
    done = run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = iter(done.stdout.splitlines())
    for line in shown_output(page):
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        assert any(re.fullmatch(pattern, text) for text in printed), f"not printed, or not in this order: {line}"


def test_blocks_are_marked_as_what_they_are():
    for page in PAGES:
        for block in blocks(page):
            where = f"{name_of(page)}, line {block.first_line - 1}"
            assert block.fence in FENCES, f"{where} begins a block of unknown kind"
            if block.fence.startswith("python"):
                ast.parse(block.text, where)


def test_links_lead_somewhere():
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())]
    broken = [(name_of(page), to) for page, to in links if "://" not in to and not (page.parent / to).exists()]
    assert broken == []


@pytest.mark.parametrize("page", ["porting", "tensorflow", "jax", "horovod"])
def test_page_shows_the_difference_of_its_two_scripts(page):
    names = [f"{name}.py" if page == "porting" else f"{page}_{name}.py" for name in ("before", "after")]
    before, after = ((ROOT / f"examples/porting/{name}").read_text().splitlines() for name in names)
    [shown] = [block for block in blocks(ROOT / f"docs/{page}.md") if block.fence == "diff"]
    diff = difflib.unified_diff(before, after, *names, n=1, lineterm="")
    assert list(shown.lines) == list(diff)


# --- docs/api.md against the code ------------------------------------------------------------------------------------


def documented():
    """The code in the first column of api.md's tables of names, such as `Trainer.run(train_func, config=None)`."""
    text = (ROOT / "docs/api.md").read_text()
    tables = re.findall(r"^\| name \| \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M)
    cells = [row.split(" | ")[0].removeprefix("| ") for table in tables for row in table.splitlines()]
    return [entry for cell in cells for entry in cell.strip("`").split("`, `")]


def dotted_name(entry):
    return entry.partition("(")[0]


def test_api_page_has_every_public_name_once():
    top = [dotted_name(entry) for entry in documented() if "." not in dotted_name(entry)]
    assert sorted(top) == sorted(paceline.__all__)


@pytest.mark.parametrize("entry", documented(), ids=dotted_name)
def test_api_page_has_the_signatures_of_the_code(entry):
    owner, *names = dotted_name(entry).split(".")
    value = getattr(paceline, owner)
    for name in names:
        if not hasattr(value, name):  # a field of a dataclass that has no default
            assert name in value.__dataclass_fields__
            return
        value = getattr(value, name) if inspect.ismodule(value) else inspect.getattr_static(value, name)
        value = getattr(value, "__func__", value)  # of a class method
    if inspect.isfunction(value) or "(" in entry:
        assert parameters_of(entry) == parameters_in_code(value)


def parameters_of(entry):
    [function] = ast.parse(f"def {dotted_name(entry).replace('.', '_')}({entry.partition('(')[2]}: ...").body
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    found = [(arg.arg, default) for arg, default in zip(positional, defaults, strict=True)]
    found += [(args.vararg.arg, None)] if args.vararg else []
    found += [(arg.arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    found += [(args.kwarg.arg, None)] if args.kwarg else []
    return [(name, "required" if default is None else ast.literal_eval(default)) for name, default in found]


def parameters_in_code(value):
    """Without what users do not pass: `clock` is there for tests, and
    report's `*args` only to be refused in words."""
    hidden = {"self", "cls", "clock", *(["args"] if value is paceline.report else [])}
    parameters = [p for p in inspect.signature(value).parameters.values() if p.name not in hidden]
    return [(p.name, "required" if p.default is p.empty else p.default) for p in parameters]
