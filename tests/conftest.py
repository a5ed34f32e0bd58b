"""Fixtures for every test, and a guard: a test fails that leaves a process, a thread, a variable or a file behind, or
holds anything of Ray's cluster."""

import compileall
import contextlib
import gc
import glob
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from forked_workers import another_source, forked_workers
from hypothesis import settings
from lean_nodes import lean_nodes
from ray_settings import SETTINGS

import paceline
from paceline import Trainer
from paceline.registry import EXPERIMENT_WORKER_MODULES, SGD_WORKER_MODULES, TORCH_WORKER_MODULES, WORKER_MODULES
from paceline.workers import nursery
from paceline.workers.ray import RayEngine

LONG_FIRST = ("ray", "examples", "procs", "e2e", "contract", "house", "unit")
"""The folders by how long a module of theirs takes. A long one that began last would keep a single process busy."""


TOGETHER = {
    **dict.fromkeys(("test_backend_training", "test_backends", "test_jax", "test_tensorflow"), "nurseries"),
    **dict.fromkeys(("test_frameworks", "test_keras_callback", "test_sgd_replicas"), "imports"),
    **dict.fromkeys(("test_tensorflow_backend", "test_tensorflow_batches"), "imports"),
}
"""Modules of which one process has all tests, since frameworks that take long to import are imported once for them: in
the nurseries of their workers, or in that process."""


# Threads of OpenMP that have nothing to do sleep instead of spinning: here all share the cores, and spinning took
# most of the time of a script that trains. Set before torch is imported, which is when it is read.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples in every run, and no limit of time: a busy machine is no bug.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")


def pytest_configure(config):
    config.option.loadscopereorder = False  # the modules with the most tests, which are short ones, would come first


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """With several processes, one has all the tests that share Ray's cluster, and begins with them; the others go by
    module, so that what a module's tests share is made once. Those that share a cluster with a job server stay
    together too, and those of scripts that are read in one process."""
    for item in items:
        shared = [name for name in ("cluster", "readers") if name in item.fixturenames]
        group = shared[0] if shared else TOGETHER.get(item.module.__name__.rpartition(".")[2], item.module.__name__)
        item.add_marker(pytest.mark.xdist_group("ray" if _needs_ray(item) else group))
    if hasattr(config, "workerinput"):
        ranks = {folder: rank for rank, folder in enumerate(LONG_FIRST)}
        items.sort(key=lambda item: (not _needs_ray(item), ranks.get(item.path.parent.name, 0)))
    for name in CLUSTERS:
        of_module = None
        for item in items:  # what a module shares ends with the last test of it that comes in one go
            if _uses(item, name):
                of_module = item.module
            if item.module is of_module:
                _last_user[name] = item
            else:
                of_module = None


CLUSTERS = ("ray_cluster", "cluster")
"""The fixtures that are a cluster. Each ends with the last test that uses it, not with the last of all: an idle one
takes a tenth of a core, and to look for what a test left behind among its hundreds of threads takes far longer than
most tests."""
_last_user = {}
_ends = {name: contextlib.ExitStack() for name in CLUSTERS}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    yield
    for name in CLUSTERS:
        if _last_user.get(name) is item:
            _ends[name].close()


@pytest.fixture(scope="session")
def ends():
    """By the name of a cluster's fixture, the stack that is closed when the cluster is not needed any more: last what
    ends the cluster, before it what of long life has workers there."""
    yield _ends
    for stack in _ends.values():
        stack.close()


def _uses(item, cluster):
    return _needs_ray(item) if cluster == "ray_cluster" else cluster in item.fixturenames


def _needs_ray(item):
    """Whether a test names the cluster, or is the "ray" one of several that are the same for every engine."""
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return "ray_cluster" in item.fixturenames or any(isinstance(param, str) and param == "ray" for param in params)


@pytest.fixture(scope="session", autouse=True)
def results_dir(tmp_path_factory):
    """Runs and temporary files go to folders of the test session's own, and nothing is drawn on the terminal."""
    path = tmp_path_factory.mktemp("results")
    # Under PYTHONDONTWRITEBYTECODE, each of the hundreds of programs that tests start would compile what it imports of
    # ours. The variable stays: a test that edits a module within a second would be given the old one.
    compileall.compile_dir(Path(paceline.__file__).parent, quiet=2)
    # The sockets of a Ray that a test starts are below TMPDIR, and the path of a socket may not be long.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as scratch:
        patch.setenv("TMPDIR", scratch)
        patch.setattr(tempfile, "tempdir", None)  # it is remembered from the first use on
        patch.setenv("PACELINE_RESULTS", str(path))
        patch.setenv("PACELINE_PROGRESS", "0")
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        # Some tests start Ray in this process; those that follow and do not name an engine mean this machine.
        patch.setattr("paceline.workers.ray_is_in_use", lambda: False)
        yield path


@pytest.fixture(scope="session")
def ray_cluster(ends):
    """One Ray for all tests that need one, with more CPUs than there are, since nobody here needs a whole one. Workers
    that stay take none of them, so that a test can count what it takes itself."""
    import ray

    modules = ("aiohttp", "numpy", "torch", "torch._dynamo", "torchmetrics")
    modules += ("fsspec", "pandas", "psutil", "pyarrow.dataset", "pyarrow.parquet", "requests", "tensorboardX")
    modules += ("lightning", "sklearn.datasets", "transformers")
    ours = (*WORKER_MODULES, *TORCH_WORKER_MODULES, *SGD_WORKER_MODULES, *EXPERIMENT_WORKER_MODULES)
    # Where Horovod is tested, not all of these packages are.
    there = [one for one in (*modules, *ours) if find_spec(one.partition(".")[0]) is not None]
    ends["ray_cluster"].enter_context(forked_workers(*there))
    lean_nodes(ends["ray_cluster"].enter_context(pytest.MonkeyPatch.context()).setattr)
    ray.init(num_cpus=8, resources={"stays": 8}, include_dashboard=False, log_to_driver=False, configure_logging=False)
    ends["ray_cluster"].callback(ray.shutdown)
    return ray


@pytest.fixture(scope="session")
def imported_on_ray(ray_cluster, ends):
    """Makes a block in which new workers of Ray's cluster have a package imported, and what a script takes with it, if
    few tests need it and it takes seconds."""
    sources = {}

    def imported_on_ray(package):
        if package not in SLOW_TO_IMPORT:
            return contextlib.nullcontext()
        if package not in sources:
            source = another_source(package, SLOW_TO_IMPORT[package])
            sources[package] = ends["ray_cluster"].enter_context(source)
        return sources[package]()

    return imported_on_ray


SLOW_TO_IMPORT = {"jax": ("jax", "optax"), "tensorflow": ("tensorflow", "keras", "tf_keras")}
"""Not our modules that import these: what those say before they do, each worker has to say by itself."""


@pytest.fixture(scope="session", params=["local", "ray"])
def warm(request, lasts, ends):
    """One group of two torch workers on each engine, for all tests that can share it."""
    engine, arguments = request.param, {}
    if engine == "ray":
        request.getfixturevalue("ray_cluster")
        engine, arguments = RayEngine(spare_workers=1), {"cpus_per_worker": 0, "resources_per_worker": {"stays": 1}}
    with (
        Trainer(backend="torch", num_workers=2, logdir=f"warm_{request.param}", engine=engine, **arguments) as trainer,
        lasts(trainer),
    ):
        if request.param == "ray":
            ends["ray_cluster"].callback(trainer.shutdown)
        yield trainer


@pytest.fixture(scope="session")
def lasts():
    """Makes a block in which the workers of a Trainer, or of a group, may outlive a test: for fixtures that are called
    `warm`, or are made before it."""

    @contextlib.contextmanager
    def lasts(one):
        _long_lived.append(one)
        yield
        _long_lived.remove(one)

    return lasts


_long_lived = []


def _lasting_groups():
    groups = (one._crew.group if isinstance(one, Trainer) else one for one in _long_lived)
    return [group for group in groups if group]


@pytest.fixture
def asking():
    """Makes the `ask` of a worker whose driver is this process: what they say is pickled, as between machines, and the
    driver answers one after the other. What is asked is noted in the list that it is given."""
    turn = threading.Lock()

    def asking(relay, asked=None):
        def ask(request):
            if asked is not None:
                asked.append(request)
            with turn:
                answer = _sent(relay.answer(_sent(request)))
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return ask

    return asking


def _sent(value):
    return pickle.loads(pickle.dumps(value))


@pytest.fixture(scope="session")
def wait_until():
    """Waits for a condition, so long that only a machine that has stopped is too slow; fails when it does not come."""

    def wait_until(condition, what="what was waited for", within_s=60):
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come within {within_s} s"
            time.sleep(0.01)

    return wait_until


@pytest.fixture(scope="session")
def wait_for_end(wait_until):
    """Waits until all of some processes, given by their pids, have ended, whether or not somebody has reaped them."""

    def wait_for_end(pids):
        wait_until(lambda: not any(map(_is_alive, pids)), f"the end of {pids}")

    return wait_for_end


def _is_alive(pid):
    """In one look: a process may end between two."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def pythons_own_handlers():
    """Ctrl-C and SIGTERM do what they do in a terminal, whatever is left of the tests before: Ray and Ray Tune put
    handlers of theirs in the place of Python's, and who is started in the background ignores Ctrl-C."""
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_leaks(request):
    """Nobody ends before all of the cluster is free: whoever comes next would have to pay for it, and be blamed."""
    needs_ray = _needs_ray(request.node)
    if needs_ray:  # what outlives the test is no leak of it
        request.getfixturevalue("ray_cluster")
    if "warm" in request.fixturenames:
        request.getfixturevalue("warm")
    held = _left(_held)  # by a fixture of the module before, which has just ended
    _remove_groups(held)
    assert not held, f"the test began on a cluster that is not free: {held}"
    before = _world()
    yield
    left = _left(lambda: _leaks(before, _world()) | _held(of_all_groups=needs_ray))
    _remove_groups(left)
    assert not left, f"the test left behind: {left}"


def _left(look, within_s=30):
    """What is seen even then, when processes and threads that are on their way out have had time, and garbage is gone:
    Tune removes some of its placement groups only when they are collected."""
    deadline = time.monotonic() + within_s
    while (left := look()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return left


def _world():
    expected = {one.pid for one in nursery._shared.values()}
    expected |= {info.pid for group in _lasting_groups() for info in group.infos}
    pid = os.getpid()
    every = _descendants(pid) if _IS_LISTED else (one.pid for one in psutil.Process(pid).children(recursive=True))
    descendants = set(every) - expected
    return {
        "processes": set(filter(None, map(_described, descendants))),
        "threads": {thread.name for thread in threading.enumerate() if not isinstance(thread, _OF_A_LIBRARY)},
        "environment": {item for item in os.environ.items() if not item[0].startswith(_SET_BY_IMPORTS)},
        "files": set(os.listdir(Path(__file__).parent.parent)) | _scratch(),
    }


def _held(of_all_groups=False):
    """What is in use of the cluster that this process is connected to, beside what stays, and by whom.

    How much is free, Ray says a moment later than it is so. Its placement groups are never late, and tell of requests
    that still wait; but to ask for them takes the longer, the more there have been.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    groups = _groups() if of_all_groups else []
    taken = ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0)
    if not groups and taken < 0.01:
        return {}
    from ray._private.state import actors

    living = [one for one in actors().values() if one["State"] != "DEAD"]
    return {"CPUs": f"{taken:.2f}", "groups": groups or _groups(), "actors": living}


def _groups():
    """The placement groups of the cluster, but for those of groups that stay."""
    from ray.util import placement_group_table

    rosters = [group._roster for group in _lasting_groups() if hasattr(group, "_roster")]
    stay = {slot.placement.id.hex() for roster in rosters for slot in roster._slots}
    return [one for id, one in placement_group_table().items() if one["state"] != "REMOVED" and id not in stay]


def _remove_groups(left):
    """Those that were left behind, once that is known: of the next tests, none shall fail for it."""
    if "groups" not in left:
        return
    from ray.util.placement_group import PlacementGroup, PlacementGroupID, remove_placement_group

    for one in left["groups"]:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(one["placement_group_id"]))))


_SET_BY_IMPORTS = (
    *("PYTEST_", "TORCHINDUCTOR_", "KMP_"),
    *("TF2_", "TF_CPP_", "TPU_", "ENABLE_RUNTIME_UPTIME_", "HDF5_PLUGIN_"),
)
"""Variables that a library sets when it is imported: no leak of whatever test is the first to do that."""

_OF_A_LIBRARY = threading._DummyThread
"""A thread that Python has not started and a library keeps for good, as TensorFlow those that call functions."""

_IS_LISTED = bool(glob.glob("/proc/self/task/*/children"))


def _descendants(pid):
    """From the kernel's own lists: psutil would look at every process of the machine, twice for each test. And by the
    system's own calls: there are hundreds of threads to be asked, and a glob takes eight times as long."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in _children(f"/proc/{pid}/task/{task}/children"):
                yield int(child)
                yield from _descendants(int(child))


def _children(path):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fd = os.open(path, os.O_RDONLY)
        try:
            return os.read(fd, 1 << 16).split()
        finally:
            os.close(fd)
    return []


def _described(pid):
    """What it runs; None for one that has ended, or is Ray's.

    A cluster starts and ends processes as it likes; what we take from it is checked by its free resources.
    """
    command = _content(f"/proc/{pid}/cmdline").split("\0")[:4]
    is_rays = any("ray" in word for word in command)
    return None if is_rays or not any(command) else f"{pid} {' '.join(command)}"


def _content(path):
    """Of a file of a process, which is empty when the process has ended, reaped or not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(path).read_text(errors="replace")
    return ""


def _scratch():
    kept = {group._scratch.name for group in _lasting_groups() if getattr(group, "_scratch", None)}
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("paceline_")} - kept


def _leaks(before, after):
    return {kind: after[kind] - before[kind] for kind in before if after[kind] - before[kind]}
