import logging

import pytest

from paceline.callbacks import CallbackList, JsonLoggerCallback, SGDCallback
from paceline.errors import ArgumentTypeError


class Recorder(SGDCallback):
    """Writes down every call in a list that several recorders may share; fails where it is told to."""

    def __init__(self, name="a", calls=None, fail_in="", error=None):
        self.name = name
        self.calls = [] if calls is None else calls
        self.fail_in = fail_in
        self.error = error or RuntimeError(f"{name} failed")

    def _note(self, what, *details):
        self.calls.append((self.name, what, *details))
        if self.fail_in == what:
            raise self.error

    def start_training(self, logdir, config, **info):
        self._note("start", logdir, config, info)

    def handle_result(self, results, **info):
        self._note("result", results)

    def handle_checkpoint(self, checkpoint, **info):
        self._note("checkpoint", checkpoint)

    def handle_restart(self, attempt, reason, **info):
        self._note("restart", attempt, reason)

    def finish_training(self, error=False, **info):
        self._note("finish", error, info["status"], info["exception"])


def started(*callbacks):
    callback_list = CallbackList(list(callbacks))
    callback_list.start_training("/run", {}, run_id="run_001", num_workers=2, world_size=2)
    for callback in callbacks:
        callback.calls.clear()
    return callback_list


def test_base_class_does_nothing_everywhere():
    callback_list = CallbackList([SGDCallback()])
    callback_list.start_training("/run", {"lr": 1}, run_id="run_001", num_workers=1, world_size=1)
    callback_list.handle_result([{"loss": 1}])
    callback_list.handle_checkpoint(object())
    callback_list.handle_restart(1, "rank 0 was killed")
    callback_list.finish_training()


def test_calls_in_list_order_with_all_information():
    calls = []
    callback_list = CallbackList([Recorder("a", calls), Recorder("b", calls)])
    callback_list.start_training("/run", {"lr": 1}, run_id="run_001", num_workers=2, world_size=2)
    callback_list.handle_result([{"loss": 1}, {"loss": 2}])
    callback_list.handle_checkpoint("checkpoint")
    callback_list.handle_restart(1, "rank 1 was killed")
    callback_list.finish_training()
    info = {"run_id": "run_001", "num_workers": 2, "world_size": 2}
    expected = [
        ("start", "/run", {"lr": 1}, info),
        ("result", [{"loss": 1}, {"loss": 2}]),
        ("checkpoint", "checkpoint"),
        ("restart", 1, "rank 1 was killed"),
        ("finish", False, "SUCCEEDED", None),
    ]
    assert calls == [(name, *call) for call in expected for name in ("a", "b")]


def test_a_callback_cannot_change_what_others_see():
    class Vandal(Recorder):
        def start_training(self, logdir, config, **info):
            config.clear()

        def handle_result(self, results, **info):
            results[0]["loss"] = "changed"
            results.pop()

    config, calls = {"lr": 1}, []
    callback_list = CallbackList([Vandal(), Recorder("b", calls), Vandal(), Recorder("d", calls)])
    callback_list.start_training("/run", config)
    assert config == {"lr": 1}
    assert [call[3] for call in calls] == [{"lr": 1}, {"lr": 1}]
    calls.clear()
    callback_list.handle_result([{"loss": 1}, {"loss": 2}])
    assert [call[2] for call in calls] == [[{"loss": 1}, {"loss": 2}]] * 2


def test_start_training_raises():
    calls = []
    error = ValueError("no")
    callback_list = CallbackList([Recorder("a", calls), Recorder("b", calls, "start", error), Recorder("c", calls)])
    with pytest.raises(ValueError, match="no") as raised:
        callback_list.start_training("/run", {})
    assert raised.value is error
    assert [call[:2] for call in calls] == [("a", "start"), ("b", "start"), ("a", "finish")]
    assert calls[-1] == ("a", "finish", True, "FAILED", error)
    callback_list.finish_training(error=True, exception=error, status="FAILED")
    assert len(calls) == 3, "what was finished is not finished again"


def test_ctrl_c_during_start_training_is_a_stop():
    first = Recorder("a")
    callback_list = CallbackList([first, Recorder("b", fail_in="start", error=KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt):
        callback_list.start_training("/run", {})
    assert first.calls[-1][1:4] == ("finish", False, "STOPPED")


@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("result", lambda callbacks: callbacks.handle_result([{}])),
        ("checkpoint", lambda callbacks: callbacks.handle_checkpoint("checkpoint")),
        ("restart", lambda callbacks: callbacks.handle_restart(1, "why")),
    ],
)
def test_an_exception_in_a_hook_propagates(hook, call):
    callback_list = started(Recorder("a", fail_in=hook))
    with pytest.raises(RuntimeError, match="a failed"):
        call(callback_list)


def test_finish_training_raises_after_all_were_finished(caplog):
    first, second, third = Recorder("a", fail_in="finish"), Recorder("b", fail_in="finish"), Recorder("c")
    callback_list = started(first, second, third)
    with pytest.raises(RuntimeError, match="a failed"), caplog.at_level(logging.ERROR):
        callback_list.finish_training()
    assert [len(callback.calls) for callback in (first, second, third)] == [1, 1, 1]
    assert "b failed" in caplog.text, "the exception that is not raised is logged"
    assert "a failed" not in caplog.text


def test_the_training_error_is_not_masked(caplog):
    first, second = Recorder("a", fail_in="finish"), Recorder("b")
    callback_list = started(first, second)
    training_error = ZeroDivisionError("training")
    with caplog.at_level(logging.ERROR):
        callback_list.finish_training(error=True, exception=training_error, status="FAILED")
    assert second.calls == [("b", "finish", True, "FAILED", training_error)]
    assert "Recorder.finish_training failed" in caplog.text
    assert caplog.records[0].exc_info[1] is first.error
    assert training_error.__notes__ == ["After this, Recorder.finish_training failed too: RuntimeError: a failed"]


def test_ctrl_c_during_finish_training_is_raised_last():
    last = Recorder("b")
    callback_list = started(Recorder("a", fail_in="finish", error=KeyboardInterrupt()), last)
    with pytest.raises(KeyboardInterrupt):
        callback_list.finish_training(error=True, exception=ValueError(), status="FAILED")
    assert len(last.calls) == 1


def test_an_object_with_the_three_methods_is_a_callback():
    class Duck:
        steps = 0

        def start_training(self, **info):
            pass

        def handle_result(self, results, **info):
            self.steps += 1

        def finish_training(self, error=False, **info):
            pass

    duck = Duck()
    callback_list = CallbackList([duck])
    callback_list.start_training("/run", {})
    callback_list.handle_result([{}])
    callback_list.handle_checkpoint("checkpoint")
    callback_list.handle_restart(1, "why")
    callback_list.finish_training()
    assert duck.steps == 1


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (
            [SGDCallback(), 3],
            r"callbacks\[1\] is of type int.*start_training, handle_result, finish_training",
        ),
        ([JsonLoggerCallback], r"callbacks\[0\] is the class JsonLoggerCallback.*JsonLoggerCallback\(...\)"),
        (SGDCallback(), r"got Callback. Put it in a list"),
        (SGDCallback, r"got type. Put it in a list"),
        (7, r"must be a list of Callback objects, got int\.$"),
    ],
)
def test_not_a_list_of_callbacks(callbacks, message):
    with pytest.raises(ArgumentTypeError, match=message):
        CallbackList(callbacks)


def test_none_and_an_empty_list_are_no_callbacks():
    for callbacks in (None, [], ()):
        callback_list = CallbackList(callbacks)
        callback_list.handle_result([{}])
        assert len(callback_list) == 0
        assert list(callback_list) == []


def with_method(name, method):
    return type("Mine", (SGDCallback,), {name: method})()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("handle_result", lambda self: None),
        ("start_training", lambda self, logdir, config: None),
        ("finish_training", lambda self, error: None),
        ("handle_checkpoint", lambda self, checkpoint, more: None),
        ("handle_restart", lambda self, attempt, reason: None),
        ("handle_resize", lambda self, former, **info: None),
    ],
)
def test_signature_that_cannot_work_is_refused(name, method):
    with pytest.raises(ArgumentTypeError, match=rf"\[0\]: Mine.{name}.* Write it as `def {name}\(self, .*info"):
        CallbackList([with_method(name, method)])


def test_coroutine_is_refused():
    async def handle_result(self, results, **info):
        pass

    with pytest.raises(ArgumentTypeError, match="nobody would await"):
        CallbackList([with_method("handle_result", handle_result)])


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("handle_result", lambda self, results: None),
        ("handle_result", lambda self, *args, **kwargs: None),
        ("finish_training", lambda self, error, exception, status: None),
        ("start_training", staticmethod(lambda **all_of_it: None)),
    ],
)
def test_signature_that_works_is_accepted(name, method):
    CallbackList([with_method(name, method)])
