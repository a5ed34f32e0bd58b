"""Reports as bytes: plain values take the short way, everything else arrives all the same."""

import fcntl
import os

import numpy as np
import pytest
import torch

from paceline.errors import ArgumentTypeError
from paceline.testing import as_worker
from paceline.workers.framing import FrameReader, framed, write_frame
from paceline.workers.reports import pack, unpack


def packed(metrics, iteration=1):
    return pack(metrics, 12.7, 0.5, iteration)


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"loss": 0.5, "step": 3, "name": "a", "done": True, "nothing": None},
        {"nested": {"list": [1, (2, 3)], "set": {4}}, "big": 2**80, "nan": float("inf")},
        {"numpy": np.float32(1.5)},
        {"bytes": b"raw"},
    ],
)
def test_round_trip_and_stamps_in_their_order(metrics):
    report = unpack(packed(dict(metrics), iteration=7))
    assert report == {**metrics, "_timestamp": 12, "_time_this_iter_s": 0.5, "_training_iteration": 7}
    assert list(report) == [*metrics, "_timestamp", "_time_this_iter_s", "_training_iteration"]


def test_time_that_the_user_measured_is_kept():
    assert unpack(packed({"_time_this_iter_s": 9.0}))["_time_this_iter_s"] == 9.0


def test_tensor_that_numpy_does_not_know():
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(ArgumentTypeError, match=r"report\(odd=\.\.\.\): a Tensor cannot be sent.*to_dense"):
        packed({"loss": 1.0, "odd": sparse})
    small = torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn)
    assert unpack(packed({"small": small}))["small"].tolist() == [0.5, 2.0]


def test_echo_that_comes_with_the_value_stays_what_it_is():
    """A loss that is still to be computed raises what its collective does, when it is asked for its number."""

    class Late(torch.Tensor):
        def detach(self):
            raise RuntimeError("Gloo all-reduce failed: Connection closed by peer")

    with pytest.raises(RuntimeError, match=r"^Gloo all-reduce failed"):
        packed({"loss": torch.zeros(()).as_subclass(Late)})


@pytest.fixture
def pipe():
    """The reading end, which does not block, and the writing end."""
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_stream_in_pieces_of_any_size(pipe, size):
    expected = [{"n": n, "array": np.arange(n)} if n % 3 == 0 else {"n": n, "text": "x" * n} for n in range(30)]
    stream = b"".join(framed(packed(dict(metrics), iteration)) for iteration, metrics in enumerate(expected, 1))
    end, start = pipe
    reader, reports = FrameReader(end), []
    for at in range(0, len(stream), size):
        os.write(start, stream[at : at + size])
        reports += [unpack(body) for body in reader.bodies()]
    assert [report["n"] for report in reports] == list(range(30))
    assert [report["_training_iteration"] for report in reports] == list(range(1, 31))


@pytest.mark.parametrize("size", [(1 << 16) - 9, (1 << 16) - 8, (1 << 16) - 7, 1 << 16, 1 << 17])
def test_all_that_is_there_comes_at_once_however_large_the_first_is(pipe, size):
    """A frame may be just as long as what is read first, and hide that there is more."""
    end, start = pipe
    fcntl.fcntl(start, fcntl.F_SETPIPE_SZ, 1 << 19)
    for body in (b"x" * size, b"y"):
        write_frame(start, body)
    assert [len(body) for body in FrameReader(end).bodies()] == [size, 1]


def test_torn_report_at_the_end_never_shows(pipe):
    end, start = pipe
    reader = FrameReader(end)
    write_frame(start, packed({"n": 1}))
    os.write(start, framed(packed({"n": 2}))[:-3])
    assert [unpack(body)["n"] for body in reader.bodies()] == [1]
    assert list(reader.bodies()) == []


def test_stream_is_over_for_who_was_interrupted_in_it(pipe, monkeypatch):
    """What was read and not kept is missing in the middle: nothing that comes after it makes sense."""
    end, start = pipe
    reader = FrameReader(end)

    def interrupted(fd, size):
        read(fd, 5)
        raise KeyboardInterrupt

    read = os.read
    write_frame(start, packed({"n": 1}))
    monkeypatch.setattr(os, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reader.bodies()
    monkeypatch.setattr(os, "read", read)
    assert reader.bodies() == []
    assert reader.closed


def test_end_of_the_stream_shows_after_the_last_report():
    end, start = os.pipe()
    os.set_blocking(end, False)
    try:
        reader = FrameReader(end)
        write_frame(start, packed({"n": 1}))
    finally:
        os.close(start)
    assert [unpack(body)["n"] for body in reader.bodies()] == [1]
    assert reader.bodies() == []
    assert reader.closed
    os.close(end)


def test_session_stamps_what_is_reported():
    import paceline

    with as_worker() as wire:
        paceline.report(loss=np.float64(0.25))
        paceline.report(loss=0.5)
    assert [(report["loss"], report["_training_iteration"]) for report in wire.reports] == [(0.25, 1), (0.5, 2)]
