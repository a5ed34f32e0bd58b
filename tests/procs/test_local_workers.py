"""Local workers and their nursery: interrupts, hangs, what they leave behind, and how much they can say."""

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

import paceline
from paceline import BackendConfig, Trainer
from paceline.errors import WorkerStartError
from paceline.workers import nursery
from paceline.workers.base import Call, Died, Preload, Printed, Raised, Resources, Returned, Sent, Size
from paceline.workers.local import LocalEngine
from paceline.workers.local_worker import Line
from paceline.workers.nursery import Nursery
from paceline.workers.nursery_process import children
from paceline.workers.reports import pack


@pytest.fixture
def make_group():
    """Makes groups; they, and the nurseries that only they use, are gone after the test."""
    groups, before = [], set(nursery._shared)

    def make_group(num_workers=2, preload=()):
        group = LocalEngine(preload=preload).group(Size(num_workers, num_workers), Resources(), Preload())
        groups.append(group)
        return group

    yield make_group
    for group in groups:
        group.close()
    for key in set(nursery._shared) - before:
        if key != LocalEngine()._all_of(Preload()):
            nursery._shared.pop(key).close()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that this process, and so its nurseries, can import; returns its name."""

    def module(text):
        name = f"preloaded_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return name

    return module


def call(group, fn, *args, logs=None):
    """On every rank; all events until each has ended."""
    events = []
    group.submit(dict.fromkeys(range(len(group.infos)), Call(fn, args)), logs)
    while sum(isinstance(event, Returned | Raised | Died) for event in events) < len(group.infos):
        group.poll(0.1, events.append)
    return events


def values(events):
    returned = [event for event in events if isinstance(event, Returned)]
    return [event.value for event in sorted(returned, key=lambda event: event.rank)]


def is_gone(process):
    """Also for one that nobody has reaped, or that ends while we look."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_interrupt_while_workers_start(make_group, module, tmp_path, wait_until):
    name = module(
        "import pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / 'begun').touch()\n"
        "while not (folder / 'go').exists(): time.sleep(0.01)"
    )
    group, other = make_group(2, [name]), make_group(1, [name])

    def interrupt():
        wait_until((tmp_path / "begun").exists, "the import", within_s=20)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            group.start()
    finally:
        thread.join()
        (tmp_path / "go").touch()
    for one in (other, group):
        one.start()
        assert values(call(one, lambda wire: os.getpid())) == [info.pid for info in one.infos]
    [forks] = [one for key, one in nursery._shared.items() if name in key]
    workers = {info.pid for one in (other, group) for info in one.infos}
    assert {child.pid for child in psutil.Process(forks.pid).children()} == workers, (
        "no worker of the first start is left"
    )


def test_module_that_never_ends_to_import_is_named(module, tmp_path):
    name = module("import time; time.sleep(1000)")
    hanging = Nursery([name], import_s=2.0)
    with pytest.raises(WorkerStartError, match=f"still importing {name} after 2 s"):
        hanging.fork(hanging.new_number(), (0, 0), str(tmp_path / "scratch"))
    assert not hanging.is_alive()
    hanging.close()


def test_driver_is_killed_while_its_nursery_imports(module, tmp_path, wait_until):
    """The folder of the workers that it has asked for goes with it."""
    name = module("import time; time.sleep(1000)")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = (
        "import sys; from paceline.workers.nursery import Nursery\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"nursery = Nursery([{name!r}])\n"
        f"nursery._send((1, 'fork', 1, {str(scratch)!r}), (0, 0))\n"
        "print('sent', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdout.readline() == b"sent\n"
        driver.kill()
    wait_until(lambda: not scratch.exists(), "the end of the folder", within_s=20)


def test_nursery_that_is_stopped_is_given_up(tmp_path):
    stopped = Nursery([], answer_s=0.2)
    assert stopped.end(stopped.new_number()) is None, "there is no such worker"
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(WorkerStartError, match=r"did not answer within 0\.2 s"):
        stopped.fork(stopped.new_number(), (0, 0), str(tmp_path / "scratch"))
    assert not stopped.is_alive()
    stopped.close()


def test_nursery_imports_from_where_the_driver_does(make_group, tmp_path, monkeypatch):
    """Under `python -P` that is not the working directory, and here neither."""
    (tmp_path / "not_on_the_path.py").write_text("")
    (tmp_path / "odd:name").mkdir()
    (tmp_path / "odd:name" / "on_the_path.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry] + [str(tmp_path / "odd:name")])
    group = make_group(1, ["not_on_the_path", "on_the_path"])
    group.start()
    names = {"not_on_the_path", "on_the_path"}
    assert values(call(group, lambda wire: names & set(sys.modules))) == [{"on_the_path"}]


def num_open():
    """Files of this process, without those of what other tests have dropped."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_runs_and_groups_leave_no_file_open(make_group, tmp_path):
    def run(group, number):
        call(group, lambda wire: print("hello"), logs={rank: tmp_path / f"{number}_{rank}.log" for rank in (0, 1)})

    group = make_group()
    group.start()
    run(group, 0)
    before = num_open()
    for number in range(1, 4):
        run(group, number)
    assert num_open() == before, "runs of one group"
    for number in range(4, 7):
        group.start()
        run(group, number)
    assert num_open() == before, "new workers"
    os.kill(nursery.shared_nursery(LocalEngine()._all_of(Preload())).pid, signal.SIGKILL)
    assert all(isinstance(event, Died) for event in call(group, lambda wire: time.sleep(100)))
    group.start()
    run(group, 7)
    assert num_open() == before, "a new nursery"


def test_trainer_that_is_dropped_takes_its_workers_and_files_along(wait_for_end):
    def train_and_drop():
        pids = Trainer(BackendConfig(), num_workers=2).run(os.getpid)
        gc.collect()
        wait_for_end(pids)  # their files are gone as well: see `no_leaks`
        return num_open()

    assert train_and_drop() == train_and_drop()


def test_workers_of_a_script_that_sets_a_timeout_for_sockets(tmp_path):
    """Which is for those of its own. In a process of its own, as its nursery is concerned too."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, socket\n"
        "from paceline import BackendConfig, Trainer\n"
        "socket.setdefaulttimeout(20)\n"
        "print(len(set(Trainer(BackendConfig(), num_workers=2).run(os.getpid))))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr


def test_no_file_can_be_opened_for_a_worker(make_group, monkeypatch):
    group, before, made = make_group(), num_open(), []

    def pipe2(flags, pipe2=os.pipe2):
        if len(made) == 4:  # in the middle of the second worker's
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(pipe2(flags))
        return made[-1]

    monkeypatch.setattr(os, "pipe2", pipe2)
    with pytest.raises(WorkerStartError, match=r"could not be started: .* Too many open files"):
        group.start()
    monkeypatch.undo()
    assert num_open() == before


def test_worker_cannot_be_forked_and_those_that_live_go_on(make_group, module):
    refuses = """
        import errno, os

        def fork(fork=os.fork, made=[]):
            if len(made) == 3:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            made.append(None)
            return fork()

        os.fork = fork
        """
    preload = [module(textwrap.dedent(refuses))]
    first, second = make_group(preload=preload), make_group(preload=preload)
    first.start()
    with pytest.raises(WorkerStartError, match=r"A worker could not be forked: .*Resource temporarily unavailable"):
        second.start()
    pids = [info.pid for info in first.infos]
    answers = {event.value for event in call(first, lambda wire: os.getpid()) if isinstance(event, Returned)}
    assert answers == set(pids)


def test_handler_raises_while_workers_start(make_group, monkeypatch):
    def interrupted(preload):
        raise TimeoutError("of the user's")

    monkeypatch.setattr("paceline.workers.local.shared_nursery", interrupted)
    with pytest.raises(TimeoutError, match="of the user's"):
        make_group().start()


def test_what_a_signal_handler_raises_in_a_write_is_no_sign_of_the_worker(monkeypatch):
    def interrupted(fd, data):
        raise TimeoutError("of the user's")

    line = Line()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", interrupted)
        for tell in (line.answer, line.send):
            with pytest.raises(TimeoutError, match="of the user's"):
                tell("something")
    line.close_worker_end()
    line.answer("to nobody")
    line.close()
    line.send("to nobody")


def test_threads_that_report_at_once(tmp_path):
    def train():
        def report_small():
            for number in range(2000):
                paceline.report(small=number)

        thread = threading.Thread(target=report_small)
        thread.start()
        for _ in range(5):
            paceline.report(large="x" * 3_000_000)  # more than the pipe holds
        thread.join()

    with Trainer(backend=BackendConfig(), num_workers=1, logdir=tmp_path) as trainer:
        reports = [results[0] for results in trainer.run_iterator(train)]
    assert [one["small"] for one in reports if "small" in one] == list(range(2000))
    assert [len(one["large"]) for one in reports if "large" in one] == [3_000_000] * 5
    assert [one["_training_iteration"] for one in reports] == list(range(1, 2006))


def test_signal_handler_reports_in_the_middle_of_a_report(make_group):
    def report(wire):
        def handle(*_):
            wire.report(pack({"from": "handler"}, 0.0, 0.0, 1))

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for number in range(20):
            wire.report(pack({"from": "loop", "text": "x" * 2_000_000}, 0.0, 0.0, number))
        signal.setitimer(signal.ITIMER_REAL, 0)

    group = make_group(1)
    group.start()
    reports = [event.value for event in call(group, report) if isinstance(event, Sent)]
    assert [one["from"] for one in reports].count("loop") == 20
    assert {one["from"] for one in reports} == {"loop", "handler"}


def test_what_was_imported_is_not_walked_through_after_each_call(make_group):
    def import_something(wire):
        import xml.dom.minidom

        cycle = [xml.dom.minidom]
        cycle.append(cycle)

    def looked_at(wire):
        from xml.dom import minidom

        objects = gc.get_objects()
        is_walked = any(one is vars(minidom) for one in objects)
        return is_walked, any(type(one) is list and minidom in one and one in one for one in objects)

    group = make_group(1)
    group.start()
    call(group, import_something)
    assert values(call(group, looked_at)) == [(False, False)], "the module is left alone, the cycle is collected"


def test_sigterm_to_all_processes_leaves_the_function_time_to_save(make_group):
    group = make_group()
    group.start()
    events = []

    def wait_for_stop(wire):
        wire.send("begun", None)
        while not wire.stopping:
            time.sleep(0.01)
        return "saved"

    group.submit(dict.fromkeys((0, 1), Call(wait_for_stop, ())))
    while sum(isinstance(event, Sent) for event in events) < 2:
        group.poll(0.1, events.append)
    worker = psutil.Process(group.infos[0].pid)
    for process in (worker.parent(), *worker.parent().children()):
        process.terminate()
    while len({event.rank for event in events if isinstance(event, Returned | Died)}) < 2:
        group.poll(0.1, events.append)
    assert [event.value for event in events if isinstance(event, Returned)] == ["saved", "saved"]


def test_worker_that_was_told_to_go_in_a_call_goes_after_it(make_group, wait_until):
    """Also in the last moment of one, when its answer is on its way already."""

    def terminate(wire):
        os.kill(os.getpid(), signal.SIGTERM)
        return "done"

    group = make_group(1)
    group.start()
    assert values(call(group, terminate)) == ["done"]
    wait_until(lambda: not group.healthy(), "the end of the worker", within_s=20)


def test_worker_is_killed_by_a_real_time_signal(make_group):
    group = make_group(1)
    group.start()
    [died] = call(group, lambda wire: os.kill(os.getpid(), signal.SIGRTMIN + 3))
    assert died == Died(0, "was killed by SIGRTMIN+3")


def test_what_a_worker_started_in_a_session_of_its_own_ends_with_it(make_group, wait_until):
    def start(wire):
        own = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        # The shell is gone at once: its child has no parent but whoever adopts it.
        text = subprocess.check_output(["setsid", "sh", "-c", "sleep 1000 >/dev/null & echo $!"], text=True)
        return own.pid, int(text)

    group = make_group()
    group.start()
    started = [[psutil.Process(pid) for pid in pids] for pids in values(call(group, start))]
    os.kill(group.infos[1].pid, signal.SIGKILL)
    wait_until(lambda: all(is_gone(one) for one in started[1]), "the end of what rank 1 had started", within_s=20)
    assert not any(is_gone(one) for one in started[0]), "what belongs to a living worker stays"
    assert values(call(group, lambda wire: 1))[0] == 1
    group.close()
    assert all(is_gone(one) for one in started[0])


def test_children_are_found_on_every_kernel(tmp_path):
    with subprocess.Popen(["sleep", "1000"]) as child:
        assert child.pid in children()
        assert child.pid in children(str(tmp_path)), "where the kernel lists nothing"
        child.kill()


def test_output_is_read_in_pieces_to_the_end(make_group, tmp_path):
    def talk(wire):
        for _ in range(3000):
            print("ü" * 999)
        print("no newline at the end", end="", flush=True)

    log = tmp_path / "rank_0.log"
    group = make_group(1)
    group.start()
    texts = [event.text for event in call(group, talk, logs={0: log}) if isinstance(event, Printed)]
    assert "".join(texts) == log.read_text()
    assert len(texts) > 1, "no piece is larger than a chunk"


def test_workers_start_though_the_current_directory_was_removed(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "relative.py", raising=False)
    gone.rmdir()
    with Trainer(BackendConfig(), num_workers=2, engine="local", logdir=tmp_path / "runs") as trainer:
        assert trainer.run(lambda: "ran") == ["ran", "ran"]
