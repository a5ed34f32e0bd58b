"""One suite for every backend that Paceline knows and for none at all, with real workers: what `BackendConfig` promises
holds for each."""

import os
import pickle
import subprocess
import sys
import tomllib
from dataclasses import FrozenInstanceError, fields
from importlib.util import find_spec
from pathlib import Path

import pytest
from probing import installed_backends, probe_of

import paceline
from paceline import Trainer, registry
from paceline.backends import base, resolve_backend
from paceline.errors import MissingDependencyError
from paceline.workers.base import Call, Died, Raised, Returned, rank_environ

GROUPS = [name for name in installed_backends() if probe_of(name).meet]


@pytest.fixture(scope="module", params=installed_backends())
def name(request):
    return request.param


@pytest.fixture(scope="module")
def probe(name):
    return probe_of(name)


@pytest.fixture(scope="module")
def warm(name, probe, lasts):
    """Two workers that all tests of a backend share."""
    backend = probe.config()
    with Trainer(backend=backend, num_workers=2, engine="local", logdir=f"backend_{name}") as trainer, lasts(trainer):
        yield trainer


with_a_group = pytest.mark.parametrize("name", GROUPS, indirect=True, scope="module")


def pids(trainer):
    return [info.pid for info in trainer._crew.ensure().infos]


def ends(group, calls):
    """How each call ended, by rank."""
    ended = {}

    def take(event):
        if isinstance(event, Returned | Raised | Died):
            ended[event.rank] = event

    group.submit(calls)
    while len(ended) < len(calls):
        group.poll(0.1, take)
    return [ended[rank] for rank in sorted(ended)]


# --- the config -----------------------------------------------------------------------------------------------------


def test_config_is_what_its_name_says(name, probe):
    config = probe.config()
    assert config.name == name
    if name != "none":
        assert type(resolve_backend(name)) is registry.find("backend", name)
    assert resolve_backend(config) is config


def test_config_cannot_be_changed_and_travels(probe):
    config = probe.config()
    for one in [*(field.name for field in fields(config)), "anything"]:
        with pytest.raises(FrozenInstanceError):
            setattr(config, one, 1)
    copy = pickle.loads(pickle.dumps(config))
    assert type(copy) is type(config)
    assert copy == config
    assert hash(copy) == hash(config)
    with pytest.raises(TypeError, match="positional argument"):
        type(config)(1)


def test_what_is_preloaded_exists(probe):
    preload = probe.config().preload
    for module in (*preload.to_join, *preload.to_train):
        assert find_spec(module) is not None, module


NEW_WORKER = """
import sys, threading
from paceline.workers.garbage import Garbage
from paceline.workers.ray_worker import RayWorker

class Watch:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            print(name)
            raise ImportError(name)

sys.meta_path.insert(0, Watch)
worker = RayWorker.__new__(RayWorker)
worker._importing, worker._garbage = threading.Lock(), Garbage()
worker.preload(sys.argv[2:])
"""


@with_a_group
def test_new_worker_on_ray_imports_the_framework_before_it_joins(probe):
    """In a Python of its own, and only so far. Those of the tests are forked from a process that has it already."""
    config = probe.config()
    command = [sys.executable, "-c", NEW_WORKER, config.package, *config.preload.to_join]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert config.package in done.stdout.split()


def test_package_is_missing(probe, monkeypatch, tmp_path):
    config = probe.config()
    config.check()
    asked = []
    monkeypatch.setattr(base, "find_spec", asked.append)  # which finds nothing
    trainer = Trainer(backend=config, num_workers=1, engine="local", logdir=tmp_path)
    if config.package is None:
        config.check()
    else:
        line = rf"backend='{config.name}' needs .*'{config.package}'.*pip install 'paceline\[{config.name}\]'"
        with pytest.raises(MissingDependencyError, match=line):
            trainer.start()
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        assert config.name in project["optional-dependencies"], "what is shown installs something"
    assert trainer._crew.group is None
    assert asked == [config.package] * (config.package is not None)


# --- the group ------------------------------------------------------------------------------------------------------


def test_each_rank_has_its_place(warm, probe):
    def look():
        place = paceline.world_rank(), paceline.world_size()
        return place, dict(os.environ), probe.place()

    found = warm.run(look)
    for info, (place, environ, place_in_group) in zip(warm._crew.group.infos, found, strict=True):
        assert place == (info.rank, 2)
        assert rank_environ(info.place).items() <= environ.items()
        assert (environ["RANK"], environ["WORLD_SIZE"]) == (str(info.rank), "2")
        assert place_in_group == (place if probe.meet else None)


def test_group_is_intact_after_a_run_and_serves_the_next(warm, probe):
    """Unless it is for one run only: then it says so, and the next run has new workers."""
    before = pids(warm)
    warm.run(probe.meet or (lambda: None))
    assert warm._crew.all(lambda wire, backend: backend.intact(), probe.config()) == [probe.serves_many] * 2
    assert (pids(warm) == before) == probe.serves_many
    before = pids(warm)
    if probe.meet:
        assert warm.run(probe.meet) == [3, 3]
    assert (pids(warm) == before) == probe.serves_many


@with_a_group
def test_group_that_a_function_has_broken_is_renewed(warm, probe):
    def spoil_on_one():
        if paceline.world_rank() == 1:
            probe.spoil()
        return os.getpid()

    before = warm.run(spoil_on_one)
    assert warm.run(probe.meet) == [3, 3]
    assert set(pids(warm)).isdisjoint(before)


def test_users_own_error_is_not_taken_for_an_echo(warm, probe):
    """Though it reads like one, and the other rank waits for the one that failed."""

    def fail_on_one():
        if paceline.world_rank() == 1:
            raise ValueError("connection closed by peer")
        if probe.meet:
            probe.meet()

    assert not probe.config().is_broken_collective(Raised(0, "ValueError", "connection closed by peer", ""))
    with pytest.raises(ValueError, match="connection closed by peer"):
        warm.run(fail_on_one)


def test_end_of_a_rank_in_a_collective_of_core_is_known_as_an_echo(probe):
    lost = Raised(0, "WorkersLostError", "The ranks cannot meet any more: rank 1 is gone", "")
    assert probe.config().is_broken_collective(lost)


@with_a_group
def test_who_leaves_frees_those_who_wait_for_it(warm, probe):
    """And what they get is known as the echo that it is."""

    def leave(wire):
        wire.leaving.close()

    warm.run(probe.meet)  # connections are made by the first collective
    waiting, left = ends(warm._crew.ensure(), {0: Call(lambda wire: probe.meet()), 1: Call(leave)})
    assert isinstance(left, Returned)
    assert isinstance(waiting, Raised), waiting
    assert probe.config().is_broken_collective(waiting)
    warm._crew.release()
    assert warm.run(probe.meet) == [3, 3]


def test_worker_that_has_left_is_as_before_and_can_join_again(warm, probe):
    """Unless it is for one group only: then it says so when it leaves, and the engine makes another."""

    def leave(wire):
        wire.leaving.close()
        return None if wire.is_spent else (probe.place(), dict(os.environ))

    crew, before = warm._crew, pids(warm)
    left = crew.all(leave)
    if not probe.rejoins:
        assert left == [None, None]
        crew.release()
        assert warm.run(probe.meet) == [3, 3]
        assert set(pids(warm)).isdisjoint(before)
        return
    for info, (place_in_group, environ) in zip(crew.group.infos, left, strict=True):
        assert place_in_group is None
        assert rank_environ(info.place).items() <= environ.items(), "its place it has from the engine"
    probe.config().join(crew, use_gpu=False)
    if probe.meet:
        assert crew.all(lambda wire: (probe.place(), probe.meet())) == [((0, 2), 3), ((1, 2), 3)]
    assert pids(warm) == before
