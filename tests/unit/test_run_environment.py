import functools
from importlib import metadata

import pytest

from paceline.runs.environment import environment, hide_secrets, installed_packages, recorded_variables
from paceline.runs.function_source import describe_function


def test_only_harmless_variables_are_recorded() -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_ACCOUNT": "mine",
        "PACELINE_RESULTS": "/results",
        "PACELINE_API_KEY": "hidden",
        "TORCH_hub_token": "hidden",
        "NCCL_SECRETS": "hidden",
        "SGD_PASSWORD": "hidden",
        "AWS_ACCESS_KEY_ID": "hidden",
        "HOME": "/home/ada",
    }
    assert recorded_variables(environ) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "1",
        "PACELINE_RESULTS": "/results",
        "SLURM_JOB_ID": "7",
    }


def test_each_run_has_its_own_variables_and_folder(monkeypatch, tmp_path) -> None:
    environment()
    monkeypatch.setenv("PACELINE_RUN_OF_MINE", "second")
    monkeypatch.chdir(tmp_path)
    now = environment()
    assert (now["variables"]["PACELINE_RUN_OF_MINE"], now["cwd"]) == ("second", str(tmp_path))


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train.py --lr 0.1 key", "train.py --lr 0.1 key"),
        ("train.py --api-key=abc --lr=1", "train.py --api-key=*** --lr=1"),
        ("train.py --wandb_token abc --lr 1", "train.py --wandb_token *** --lr 1"),
        ("train.py --use-token --lr 1", "train.py --use-token --lr 1"),
        ("PASSWORD=abc", "PASSWORD=***"),
    ],
)
def test_secrets_on_the_command_line_are_hidden(command: str, shown: str) -> None:
    assert hide_secrets(command.split()) == shown.split()


def test_packages_are_those_that_python_finds() -> None:
    expected: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"].replace("_", "-").replace(".", "-").lower()
        expected.setdefault(name, distribution.version)
    assert expected["orjson"]
    assert installed_packages() == expected


def plain(config: object, lr: float = 0, secret: object = None) -> int:
    return 1


@functools.lru_cache
def decorated(config: object) -> int:
    return 2


class Callable:
    def __call__(self, config: object) -> int:
        return 3

    def method(self) -> int:
        return 4


def test_a_function_is_described_by_its_text() -> None:
    described = describe_function(plain)
    assert described == {
        "name": "plain",
        "module": plain.__module__,
        "file": __file__,
        "line": plain.__code__.co_firstlineno,
        "source": "def plain(config: object, lr: float = 0, secret: object = None) -> int:\n    return 1\n",
    }


def test_what_wraps_a_function_is_looked_through() -> None:
    partial = describe_function(functools.partial(functools.partial(plain, lr=1), 2, secret="x"))
    assert (partial["name"], partial["partial"]) == ("plain", ["lr", "secret"])
    assert "return 1" in partial["source"]
    assert "return 2" in describe_function(decorated)["source"]
    assert describe_function(Callable())["name"] == "Callable"
    assert "return 3" in describe_function(Callable())["source"]
    assert describe_function(Callable().method)["name"] == "Callable.method"
    assert "return 4" in describe_function(Callable().method)["source"]
    assert "lambda: 5" in describe_function(lambda: 5)["source"]


def test_a_function_without_a_file_has_no_source() -> None:
    namespace: dict[str, object] = {}
    exec("def typed(config): return 1", namespace)  # as in a REPL
    described = describe_function(namespace["typed"])  # type: ignore[arg-type]
    assert (described["name"], described["source"], described["line"]) == ("typed", None, None)
    assert describe_function(len)["source"] is None
    assert describe_function(functools.partial(len))["name"] == "len"
