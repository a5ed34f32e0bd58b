"""One suite for every engine that Paceline knows: what `WorkerGroup` promises holds wherever the workers live."""

import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import numpy as np
import pytest

from paceline import registry
from paceline.errors import StackDumpError, TrainFunctionError
from paceline.workers import resolve_engine
from paceline.workers.base import (
    DIRECT,
    Asked,
    Call,
    Died,
    Preempted,
    Preload,
    Printed,
    Raised,
    Resources,
    Returned,
    Sent,
    Size,
)
from paceline.workers.reports import pack

ON_PROCESSES = sorted(set(registry.names("engine")) - {"inline"})


@pytest.fixture(scope="module")
def groups(lasts):
    """Gives the group that all tests of an engine share, whole and idle."""
    with ExitStack() as stack:
        made = {}

        def groups(engine):
            if engine not in made:
                made[engine] = stack.enter_context(closing(new_group(engine)))
                stack.enter_context(lasts(made[engine]))
            elif not made[engine].healthy():
                made[engine].abort(lambda event: None)
                made[engine].start()
            return made[engine]

        yield groups


def new_group(engine):
    size = 0 if engine == "inline" else 2
    resources = Resources(cpus=0, custom={"stays": 1}) if engine == "ray" else Resources()
    group = resolve_engine(engine, max_workers=size).group(Size(size, size), resources, Preload())
    group.start()
    return group


@pytest.fixture(params=registry.names("engine"))
def group(request, groups):
    if request.param != "inline":
        yield groups(request.param)
        return
    with closing(new_group("inline")) as group:  # this process itself is changed while it is a worker
        yield group


@pytest.fixture(params=ON_PROCESSES)
def process_group(request, groups):
    return groups(request.param)


def run(group, fn, *args, logs=None, until=None):
    """Call on every rank; returns all events once each rank has ended."""
    events = []
    ranks = range(len(group.infos))
    group.submit(dict.fromkeys(ranks, Call(fn, args)), logs)
    while sum(isinstance(event, Returned | Raised | Died) for event in events) < len(ranks):
        group.poll(0.1, events.append)
    return events


def on_ray(group):
    """Ray tells that a worker is gone, not how."""
    return type(group).__name__ == "RayGroup"


def of(kind, events):
    return sorted((event for event in events if isinstance(event, kind)), key=lambda event: event.rank)


def test_a_call_runs_once_on_every_rank_and_knows_its_place(group):
    places = [event.value for event in of(Returned, run(group, lambda wire: wire.place))]
    assert [place.world_rank for place in places] == list(range(len(group.infos)))
    assert all(place.world_size == len(group.infos) for place in places)
    assert places == [info.place for info in group.infos]


def test_worker_that_was_given_no_gpu_sees_none(process_group):
    seen = [event.value for event in of(Returned, run(process_group, lambda wire: os.environ["CUDA_VISIBLE_DEVICES"]))]
    assert seen == ["", ""]


def test_messages_arrive_in_order_and_before_the_answer(group):
    def send(wire):
        for number in range(500):
            wire.send("count", number)
        return "done"

    events = run(group, send)
    for rank in range(len(group.infos)):
        mine = [event for event in events if not isinstance(event, Printed) and event.rank == rank]
        assert [event.value for event in mine] == [*range(500), "done"]
        assert all(isinstance(event, Sent) and event.kind == "count" for event in mine[:-1])


def test_an_exception_comes_with_type_message_and_traceback(group):
    def fail(wire):
        raise KeyError(f"rank {wire.place.world_rank}")

    for rank, event in enumerate(of(Raised, run(group, fail))):
        assert event.type_name == "KeyError"
        assert type(event.exception) is KeyError
        assert event.exception.args == (f"rank {rank}",)
        assert "in fail" in event.traceback
    assert group.healthy(), "an exception does not end the worker"


ODD = [
    "Mumbles",
    "Grumbles",
    "Clings",
    "Disguised",
    "Picky",
    "Frozen",
    "Stranger",
    "StopIteration",
    "SystemExit",
    "GeneratorExit",
]


def test_odd_exceptions_arrive(group):
    """Whatever the exception's class does, the driver learns of it."""

    def fail(wire, name):
        import sys
        import types
        from dataclasses import dataclass

        class Mumbles(Exception):
            def __str__(self):
                raise ValueError("no words")

        class Grumbles(Exception):
            def __str__(self):
                raise SystemExit(1)

            def with_traceback(self, trace):
                raise KeyboardInterrupt

        class Clings(Exception):
            def __reduce__(self):
                raise GeneratorExit

        class Disguised(Exception):
            def __reduce__(self):
                return str, ("not an exception",)

        class Picky(Exception):
            def __init__(self, one, two):
                super().__init__(f"{one} {two}")

        @dataclass(frozen=True)
        class Frozen(Exception):
            code: int

        class Stranger(Exception):
            """Its module is nowhere else."""

        Stranger.__module__, Stranger.__qualname__ = "only_here", "Stranger"
        sys.modules["only_here"] = types.SimpleNamespace(Stranger=Stranger)
        odd = [Mumbles(), Grumbles(), Clings(), Disguised(), Picky(1, 2), Frozen(3), Stranger()]
        odd += [StopIteration(4), SystemExit(5), GeneratorExit()]
        raise next(error for error in odd if type(error).__name__ == name)

    for name in ODD:
        raised = of(Raised, run(group, fail, name))
        assert len(raised) == len(group.infos)
        for event in raised:
            assert event.type_name.endswith(name)
            assert "in fail" in event.traceback
    assert group.healthy()


def test_the_group_serves_one_call_after_another(group):
    for number in range(5):
        assert {event.value for event in of(Returned, run(group, lambda wire, n: n, number))} == {number}


def test_stop_is_seen_by_the_running_call_and_forgotten_by_the_next(group):
    def wait_for_stop(wire):
        wire.send("begun", None)
        waited = threading.Event()
        while not wire.stopping:
            waited.wait(0.001)
        return "stopped"

    events = []
    num = len(group.infos)
    group.submit(dict.fromkeys(range(num), Call(wait_for_stop)))

    def on_event(event):
        events.append(event)
        if isinstance(event, Sent):
            group.request_stop()

    while len(of(Returned, events)) < num:
        group.poll(0.1, on_event)
    assert {event.value for event in of(Returned, events)} == {"stopped"}
    assert {event.value for event in of(Returned, run(group, lambda wire: wire.stopping))} == {False}


def test_shared_outlives_a_call(group):
    run(group, lambda wire: wire.shared.update(number=wire.place.world_rank + 10))
    values = [event.value for event in of(Returned, run(group, lambda wire: wire.shared["number"]))]
    assert values == [10 + rank for rank in range(len(group.infos))]


def test_stacks_name_the_function_that_runs(group):
    def dig(wire):
        wire.send("here", None)
        waited = threading.Event()
        while not wire.stopping:
            waited.wait(0.01)

    stacks = {}

    def on_event(event):
        if isinstance(event, Sent) and not stacks:
            first.append(event.rank)
            stacks.update(group.stacks())
            group.request_stop()
        ended.append(event) if isinstance(event, Returned | Died) else None

    ended, first = [], []
    group.submit(dict.fromkeys(range(len(group.infos)), Call(dig)))
    while len(ended) < len(group.infos):
        group.poll(0.1, on_event)
    assert {type(event) for event in ended} == {Returned}, "asking for stacks does no harm, at any time"
    assert sorted(stacks) == list(range(len(group.infos)))
    assert "dig" in stacks[first[0]]


@pytest.mark.parametrize("engine", registry.names("engine"))
def test_close_is_idempotent(engine):
    group = new_group(engine)
    group.close()
    group.close()
    assert not group.healthy()
    with pytest.raises(StackDumpError, match="no workers"):
        group.stacks()


def test_worker_is_killed(process_group):
    def die_on_one(wire):
        if wire.place.world_rank == 1:
            wire.send("last words", 1)
            os.kill(os.getpid(), 9)
        return "alive"

    events = run(process_group, die_on_one)
    assert [event.value for event in of(Returned, events)] == ["alive"]
    [died] = of(Died, events)
    assert died.rank == 1
    assert ("was lost" if on_ray(process_group) else "SIGKILL") in died.reason
    assert not process_group.healthy()


@pytest.mark.parametrize(
    ("way", "reason", "reason_on_ray"),
    [
        ("segfault", "SIGSEGV", "was lost"),
        ("os._exit", "exit code 4", "was lost"),
    ],
)
def test_worker_ends_itself(process_group, way, reason, reason_on_ray):
    def end(wire):
        import ctypes

        if way == "segfault":
            ctypes.string_at(0)
        os._exit(4)

    deaths = of(Died, run(process_group, end))
    assert len(deaths) == 2
    expected = reason_on_ray if on_ray(process_group) else reason
    assert all(expected in death.reason for death in deaths)


def test_what_a_dying_worker_sent_is_not_lost(process_group):
    def send_and_exit(wire):
        for number in range(200):
            wire.send("count", number)
        wire.flush()
        os._exit(0)

    events = run(process_group, send_and_exit)
    for rank in (0, 1):
        mine = [event for event in events if event.rank == rank and not isinstance(event, Printed)]
        assert [event.value for event in mine[:-1]] == list(range(200))
        assert isinstance(mine[-1], Died)


def test_output_goes_to_the_log_and_to_the_driver(process_group, tmp_path, wait_until):
    def talk(wire):
        import subprocess

        print(f"hello from {wire.place.world_rank}")
        subprocess.run(["echo", "from a child"], check=True)

    logs = {rank: tmp_path / f"rank_{rank}.log" for rank in (0, 1)}
    events = run(process_group, talk, logs=logs)
    told = {rank: f"hello from {rank}\nfrom a child\n" for rank in logs}

    def heard():
        process_group.poll(0.05, events.append)
        return {rank: "".join(event.text for event in of(Printed, events) if event.rank == rank) for rank in logs}

    wait_until(lambda: heard() == told)
    assert {rank: path.read_text() for rank, path in logs.items()} == told


def test_value_that_cannot_travel_is_an_error_that_says_so(process_group):
    [first, _] = of(Raised, run(process_group, lambda wire: threading.Lock()))
    assert isinstance(first.exception, TrainFunctionError)
    assert "cannot be pickled" in first.message


def test_exception_that_cannot_travel_comes_as_text(process_group):
    def fail(wire):
        error = ValueError("with a lock inside")
        error.lock = threading.Lock()
        raise error

    [first, _] = of(Raised, run(process_group, fail))
    assert first.exception is None
    assert (first.type_name, first.message) == ("ValueError", "with a lock inside")


def test_workers_do_not_share_random_numbers(process_group):
    def draw(wire):
        import random

        return random.random()

    process_group.abort(lambda event: None)
    process_group.start()  # where workers are forked, these have just been
    first, second = (event.value for event in of(Returned, run(process_group, draw)))
    assert first != second


def test_function_sees_the_drivers_working_directory_path_and_environment(process_group, monkeypatch):
    def look(wire):
        import sys

        return os.getcwd(), sys.path[:], os.environ["RANK"], os.environ["WORLD_SIZE"]

    import sys

    for rank, event in enumerate(of(Returned, run(process_group, look))):
        cwd, path, *ranks = event.value
        assert cwd == os.getcwd()
        assert path[: len(sys.path)] == sys.path
        assert ranks == [str(rank), "2"]


def test_reports_come_before_the_question_that_follows_them(process_group):
    """Also when questions come so quickly that reports alone would not be looked at yet."""

    def report_and_ask(wire):
        for number in range(20):
            wire.report(pack({"number": number}, 0.0, 0.0, number))
            wire.ask("next", number)

    events = []

    def take(event):
        events.append(event)
        if isinstance(event, Asked):
            process_group.answer(event, None)

    ranks = range(len(process_group.infos))
    process_group.submit(dict.fromkeys(ranks, Call(report_and_ask)))
    while len(of(Returned, events)) < len(ranks):
        process_group.poll(0.1, take)
    for rank in ranks:
        mine = [event for event in events if isinstance(event, Asked | Sent) and event.rank == rank]
        told = [event.value if isinstance(event, Asked) else event.value["number"] for event in mine]
        assert told == [number for number in range(20) for _ in range(2)]
        assert [type(event) for event in mine] == [Sent, Asked] * 20


def test_who_dies_while_its_question_is_open_is_noticed(process_group):
    """Though others go on, and the question is not answered."""

    def ask_or_go_on(wire):
        if wire.place.world_rank == 1:
            wire.ask("for ever", os.getpid())
        while not wire.stopping:
            time.sleep(0.01)

    events = []
    process_group.submit(dict.fromkeys(range(2), Call(ask_or_go_on)))
    while not of(Asked, events):
        process_group.poll(0.1, events.append)
    os.kill(of(Asked, events)[0].value, signal.SIGKILL)
    while not of(Died, events):
        process_group.poll(0.1, events.append)
    assert [event.rank for event in of(Died, events)] == [1]
    process_group.request_stop()
    while not of(Returned, events):
        process_group.poll(0.1, events.append)


def test_a_question_is_answered(group):
    events = []

    def deliver(event):
        events.append(event)
        if isinstance(event, Asked):
            wrong = event.value < 0
            group.answer(event, ValueError("negative") if wrong else event.value * 2)

    def ask(wire):
        doubled = wire.ask("double", 21)
        try:
            wire.ask("double", -1)
        except ValueError as error:
            return doubled, str(error)

    group.submit(dict.fromkeys(range(len(group.infos)), Call(ask)))
    while len(of(Returned, events)) < len(group.infos):
        group.poll(0.1, deliver)
    assert {event.value for event in of(Returned, events)} == {(42, "negative")}
    assert [event.topic for event in of(Asked, events)] == ["double"] * 2 * len(group.infos)


def test_memory_that_a_step_has_freed_is_there_for_the_next(process_group):
    """If the kernel gets it back, every page of it is a fault again."""

    def faults_of_steps(wire):
        former = 0
        for number in range(25):
            tensors = [np.ones(1 << 17) for _ in range(20)]  # a megabyte each
            del tensors
            if number == 4:
                former = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - former

    num_pages = 20 * (20 << 20) // resource.getpagesize()
    assert all(event.value < num_pages / 10 for event in of(Returned, run(process_group, faults_of_steps)))


def converse(wire, num_questions):
    """As DistributedSGD does: the next question goes out with what came of the last answer."""
    return [wire.ask_directly("double", (wire.place.world_rank, number)) for number in range(num_questions)]


def test_questions_are_answered_directly(process_group):
    """Large ones too, on Ray from the second on past it; and other questions at the same time."""
    events = []

    def deliver(event):
        events.append(event)
        if isinstance(event, Asked):
            process_group.answer(event, b"x" * 3_000_000 if event.topic == "large" else (event.topic, event.value))

    def ask(wire):
        answers = converse(wire, 50)
        assert len(wire.ask_directly("large", b"y" * 3_000_000)) == 3_000_000
        with ThreadPoolExecutor() as pool:
            beside = pool.submit(wire.ask, "beside", 1)
            answers.append(wire.ask_directly("double", beside.result()))
        return answers

    for _ in range(2):  # a call that has ended leaves nothing to the next
        events.clear()
        process_group.submit(dict.fromkeys(range(2), Call(ask)))
        while len(of(Returned | Raised, events)) < 2:
            process_group.poll(0.1, deliver)
        first, second = ([("double", (rank, number)) for number in range(50)] for rank in (0, 1))
        last = ("double", ("beside", 1))
        assert [event.value for event in of(Returned, events)] == [[*first, last], [*second, last]]
        num_direct = sum(event.number == DIRECT for event in of(Asked, events))
        assert num_direct == 2 * (51 if on_ray(process_group) else 52)


@pytest.mark.parametrize("num_answered", [0, 1, 5])
def test_call_that_waits_for_a_direct_answer_is_aborted(process_group, num_answered):
    events = []

    def deliver(event):
        events.append(event)
        if isinstance(event, Asked) and event.value[1] < num_answered:
            process_group.answer(event, None)

    process_group.submit(dict.fromkeys(range(2), Call(converse, (10,))))
    while len(of(Asked, events)) < 2 * (num_answered + 1):
        process_group.poll(0.1, deliver)
    former = [info.pid for info in process_group.infos]
    process_group.abort(events.append)
    process_group.start()
    pids = [event.value for event in of(Returned, run(process_group, lambda wire: os.getpid()))]
    assert pids == [info.pid for info in process_group.infos]
    assert (pids == former) == on_ray(process_group), "there they let go, and stay"


def test_worker_dies_while_it_is_asked_directly(process_group):
    events = []

    def deliver(event):
        events.append(event)
        if isinstance(event, Asked):
            process_group.answer(event, None)

    def die(wire):
        converse(wire, 5)
        if wire.place.world_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return converse(wire, 5)

    process_group.submit(dict.fromkeys(range(2), Call(die)))
    while len(of(Died | Returned, events)) < 2:
        process_group.poll(0.1, deliver)
    assert [event.rank for event in of(Died, events)] == [1]
    assert [event.value for event in of(Returned, events)] == [[None] * 5]


def test_sigterm_in_a_call_is_a_notice_and_makes_it_stop(process_group):
    def wait(wire):
        wire.send("ready", os.getpid())
        while not wire.stopping:
            threading.Event().wait(0.01)
        return "saved"

    events = []

    def deliver(event):
        events.append(event)
        if isinstance(event, Sent):
            os.kill(event.value, signal.SIGTERM)

    process_group.submit({1: Call(wait)})
    while not of(Returned, events):
        process_group.poll(0.1, deliver)
    assert of(Preempted, events)[0].rank == 1
    assert [event.value for event in of(Returned, events)] == ["saved"]
    told = of(Sent, events)[0].value
    process_group.abort(lambda event: None)
    process_group.start()
    assert told not in {info.pid for info in process_group.infos}, "who will be taken away joins no other group"


def test_sigterm_ends_an_idle_worker_and_the_group_is_made_whole(process_group, wait_until):
    pids = [info.pid for info in process_group.infos]

    def is_ended():  # on Ray, the thread of the last call may still be about to end
        with suppress(ProcessLookupError):
            os.kill(pids[1], signal.SIGTERM)
        return not process_group.healthy()

    wait_until(is_ended, "the end of an idle worker")
    process_group.abort(lambda event: None)
    process_group.start()
    assert process_group.healthy()
    assert process_group.infos[1].pid != pids[1]


def fork_and_terminate(wire):
    """As a data loader does with its workers."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"!")
        threading.Event().wait()
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_sigterm_to_a_child_of_the_function_is_no_notice(process_group):
    events = run(process_group, fork_and_terminate)
    assert [event.value for event in of(Returned, events)] == [-signal.SIGTERM] * 2
    assert of(Preempted, events) == []


def test_a_group_of_fixed_size_never_grows(group):
    assert not group.can_grow()


def test_what_was_sent_before_an_abort_is_not_lost(process_group, tmp_path, wait_until):
    def talk(wire):
        for number in range(1000):
            wire.send("number", number)
            (tmp_path / str(wire.place.world_rank)).touch()
        wire.send("done", None)
        while not wire.stopping:
            threading.Event().wait(0.01)
        wire.flush()

    events = []
    process_group.submit(dict.fromkeys([0, 1], Call(talk)))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)  # how far they come while nobody listens does not matter
    process_group.abort(events.append)
    for rank in (0, 1):
        numbers = [event.value for event in of(Sent, events) if event.kind == "number" and event.rank == rank]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > 0


def join(wire, path):
    """As a backend does; what leaves again tells that it has been called."""

    def leave():
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")

    wire.leaving.callback(leave)
    return os.getpid()


def join_for_life(wire):
    def leave():
        raise RuntimeError("this framework has one group in a process's life")

    wire.leaving.callback(leave)
    return os.getpid()


def test_worker_leaves_its_group_before_it_joins_another(process_group, tmp_path):
    path = tmp_path / "left"
    path.touch()
    before = {event.value for event in of(Returned, run(process_group, join, str(path)))}
    process_group.abort(lambda event: None)
    process_group.start()
    survivors = before & {info.pid for info in process_group.infos}
    assert sorted(map(int, path.read_text().split())) == sorted(survivors), "once, and nobody else"
    assert survivors or not on_ray(process_group)


def test_worker_that_cannot_leave_its_group_is_replaced(process_group):
    before = {event.value for event in of(Returned, run(process_group, join_for_life))}
    process_group.abort(lambda event: None)
    process_group.start()
    assert before.isdisjoint(info.pid for info in process_group.infos)
    assert process_group.healthy()


def test_this_process_leaves_when_its_group_is_closed(tmp_path):
    group = resolve_engine("inline", max_workers=0).group(Size(0, 0), Resources(), Preload())
    group.start()
    path = tmp_path / "left"
    run(group, join, str(path))
    group.abort(lambda event: None)
    group.start()
    assert not path.exists()
    group.close()
    group.close()
    assert path.read_text() == f"{os.getpid()}\n"
