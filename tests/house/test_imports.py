"""The shape of the house: which way imports point, what they cost, and what users find."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline import registry

SRC = Path(paceline.__file__).parent

# Each part of the package may import from itself and from parts on a lower floor.
FLOORS = [
    {"__main__"},
    {"cli", "testing", "__init__"},
    {"driven", "experiment", "integrations", "keras", "launch", "pytorch", "search", "sgd"},
    {"core", "profiling", "trainer"},
    {"arguments", "control", "prepare", "worker_table"},
    {"recording", "session"},
    {"rank_session"},
    {"backends", "callbacks", "data", "runs"},
    {"checkpoints"},
    {"project_file", "workers"},
    {"folder_removal", "html_table", "json_text", "no_collection", "regular_files", "torch_names"},
    {"frameworks"},
    {"errors", "registry"},
]
FLOOR_OF = {part: number for number, parts in enumerate(FLOORS) for part in parts}

# A third party is imported in the modules named here and nowhere else.
HOMES = {
    "torch": {
        "frameworks/torch",
        "backends/torch",
        "backends/horovod",
        "prepare/",
        "data/torch",
        "core/torch",
        "driven/torch",
        "experiment/",
        "integrations/",
        "pytorch/",
        "profiling/torch",
        "sgd/torch",
    },
    "jax": {"backends/jax", "frameworks/jax", "sgd/jax"},
    "numpy": {
        "frameworks/jax_arrays",
        "frameworks/numpy",
        "frameworks/tensorflow_arrays",
        "prepare/rng",
        "callbacks/tensorboard_logger",
        "data/",
        "recording/row",
        "runs/row",
        "pytorch/",
        "sgd/",
    },
    "optax": {"frameworks/jax_arrays", "sgd/jax"},
    "pandas": {"runs/pandas_frame", "data/pandas"},
    "pyarrow": {"data/"},
    "fsspec": {"checkpoints/storage/fsspec", "data/kinds/files"},
    "tensorboardX": {"callbacks/tensorboard_logger", "cli/tensorboard", "pytorch/tensorboard_writer"},
    "mlflow": {"callbacks/mlflow_logger"},
    "wandb": {"callbacks/wandb_logger"},
    "matplotlib": {"profiling/picture"},
    "IPython": {"callbacks/progress"},
    "rich": {"callbacks/", "trainer", "worker_table"},
    "ray": {"cli/ray", "workers/ray", "data/ray", "search/tune", "sgd/ray"},
    "sklearn": {"data/fold_columns"},
    "tensorflow": {"backends/tensorflow", "data/tensorflow", "frameworks/tensorflow", "keras", "sgd/tensorflow"},
    "horovod": {"backends/horovod"},
    "torchmetrics": {"experiment/measures", "pytorch/", "prepare/"},
    "ruamel": {"experiment/binding", "experiment/document"},
    "typer": {"cli/"},
    "transformers": {"integrations/transformers"},
    "lightning": {"integrations/fabric", "integrations/lightning"},
}


def modules():
    return sorted(SRC.rglob("*.py"))


def name_of(path):
    return str(path.relative_to(SRC).with_suffix(""))


def imported(path):
    """The modules that a file imports, anywhere in it, except for type checking only."""
    found = set()
    tree = ast.parse(path.read_text())
    typing_only = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    skipped = {id(inner) for node in typing_only for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def imports():
    """Each module, by name, with each that it imports."""
    return [(name_of(path), module) for path in modules() for module in imported(path)]


def test_imports_point_down():
    wrong = []
    for name, module in imports():
        part, (package, *inside) = name.split("/")[0], module.split(".")
        if package == "paceline" and inside and inside[0] in FLOOR_OF and inside[0] != part:
            wrong += [f"{name} imports {module}"] if FLOOR_OF[inside[0]] <= FLOOR_OF[part] else []
    assert wrong == []


def test_no_import_is_hidden_in_a_string():
    """A name that stands for an import is in the registry, or among the public names."""
    parts = {f"paceline.{name_of(path).removesuffix('/__init__').replace('/', '.')}" for path in modules()}
    for path in modules():
        constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        hidden = [text for text in constants if isinstance(text, str) and text.partition(":")[0] in parts]
        assert not hidden or name_of(path) in ("registry", "__init__"), f"{name_of(path)}: {hidden}"


def test_modules_of_ours_that_workers_have_beforehand_are_there():
    """What cannot be imported beforehand is left to the worker, and nobody would notice."""
    lists = [value for name, value in vars(registry).items() if name.endswith("WORKER_MODULES")]
    ours = {module for modules in lists for module in modules if module.startswith("paceline.")}
    there = {f"paceline.{name_of(path).removesuffix('/__init__').replace('/', '.')}" for path in modules()}
    assert "paceline.sgd.serving" in ours
    assert ours <= there


def test_third_parties_stay_in_their_modules():
    wrong = []
    for name, module in imports():
        homes = HOMES.get(module.split(".")[0])
        wrong += [f"{name} imports {module}"] if homes is not None and not name.startswith(tuple(homes)) else []
    assert wrong == []


def test_every_part_has_a_floor():
    parts = {name_of(path).split("/")[0] for path in modules()}
    assert parts == set(FLOOR_OF)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_import_paceline_loads_nothing_heavy():
    heavy = {"torch", "ray", "pandas", "fsspec", "matplotlib", "rich", "numpy"}
    assert heavy & {*run("import paceline, sys; print(*sys.modules)")} == set()


def test_command_line_answers_without_anything_heavy():
    heavy = {"torch", "ray", "pandas", "fsspec", "matplotlib", "numpy", "rich", "paceline.trainer", "paceline.launch"}
    code = (
        "import contextlib, io, sys; from paceline.cli.app import build\n"
        "with contextlib.redirect_stdout(io.StringIO()): build('run')(['run', '--help'], standalone_mode=False)\n"
        "print(*sys.modules)"
    )
    assert heavy & {*run(code)} == set()


def test_a_trainer_needs_no_framework_in_the_driver():
    code = (
        "import paceline, sys; from paceline import BackendConfig, Trainer\n"
        "with Trainer(backend=BackendConfig(), num_workers=1) as t: t.run(lambda: paceline.report(x=1))\n"
        "print(*sys.modules)"
    )
    assert {"torch", "ray", "pandas", "fsspec"} & {*run(code)} == set()


def test_worker_of_distributed_sgd_imports_nothing_of_the_driver_s_side():
    """It would do so each time that workers are replaced, before the next step."""
    code = "import paceline.sgd.model_calls, paceline.sgd.no_group, paceline.sgd.serving, sys; print(*sys.modules)"
    found = {*run(code)}
    assert "paceline.sgd.side" in found
    assert {"paceline.sgd.distributed", "paceline.control", "paceline.recording", "torch"} & found == set()


def test_public_names_are_sorted_and_all_there():
    assert paceline.__all__ == sorted(paceline.__all__, key=lambda name: (not name.isupper(), name))
    assert set(paceline.__all__) == {*paceline._HOME_OF, "LOG_FORMAT", "__version__"}
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert dir(paceline) == sorted(paceline.__all__)


def test_names_of_raysgd_are_the_same_classes():
    assert paceline.SGDCallback is paceline.Callback
    assert paceline.SGDIterator is paceline.RunIterator


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = paceline.Trainr


def test_names_for_type_checkers_are_the_same():
    tree = ast.parse((SRC / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    names = {alias.asname or alias.name for node in block.body for alias in node.names}
    assert names == set(paceline._HOME_OF)


def test_errors_are_all_in_the_drawn_tree_and_travel():
    import pickle

    from paceline import errors

    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    for cls in classes:
        assert issubclass(cls, errors.PacelineError)
        assert cls.__name__ in errors.__doc__
        error = cls("a", "b") if cls is errors.MissingDependencyError else cls("a")
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (cls, str(error))
