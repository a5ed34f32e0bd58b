import errno
import math
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import orjson
import pytest

from paceline.json_text import encode_document, encode_line
from paceline.runs.durable import JsonLines, read_json, read_json_lines, write_atomic


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """The kernel lets no file of this process grow past the limit: a full disk, partial writes included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("durable", [True, False])
def test_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, b"old", durable)
    write_atomic(path, b"new", durable)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_write_takes_a_bare_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_atomic("here.json", b"1")
    assert (tmp_path / "here.json").read_bytes() == b"1"


def test_disk_full_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, b"old")
    with files_limited_to(1000), pytest.raises(OSError, match="large"):
        write_atomic(path, b"x" * 5000)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_onto_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "run.json", b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (math.inf, None),
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        (np.arange(6).reshape(2, 3)[:, ::2], [[0, 2], [3, 5]]),
        ({1, 2}, [1, 2]),
        ({1: "a", None: "b"}, {"1": "a", "null": "b"}),
        ({(1, 2): math.nan}, {"(1, 2)": None}),
        ([2**70, {"x": 1}], [str(2**70), {"x": 1}]),
        ("\ud800", "\\ud800"),
        (Path("/x"), "/x"),
        (Unprintable(), "<Unprintable object without a repr>"),
    ],
)
def test_every_value_becomes_json(value: object, expected: object) -> None:
    assert orjson.loads(encode_line({"v": value})) == {"v": expected}
    assert orjson.loads(encode_document({"v": value})) == {"v": expected}


def test_a_cycle_and_a_long_repr_are_cut() -> None:
    cycle: dict[str, object] = {"a": 1}
    cycle["self"] = [cycle]
    assert orjson.loads(encode_line(cycle)) == {"a": 1, "self": ["..."]}
    assert len(encode_line(slice("x" * 100_000))) < 1_100


def test_a_tensor_is_written_as_its_numbers() -> None:
    torch = pytest.importorskip("torch")
    line = encode_line({"loss": torch.tensor(0.5, requires_grad=True), "big": torch.zeros(1_000_000)})
    decoded = orjson.loads(line)
    assert decoded["loss"] == 0.5
    assert decoded["big"].startswith("tensor(")


def test_lines_are_written_at_flush(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"step": 1})
    lines.append({"step": 2, "text": "a\nb"})
    assert len(lines) == 2
    assert read_json_lines(lines.path) == []
    lines.flush()
    assert read_json_lines(lines.path) == [{"step": 1}, {"step": 2, "text": "a\nb"}]
    assert len(lines) == 0
    lines.close()


def test_what_was_appended_later_changed_is_recorded_as_it_was(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m")
    metrics = {"loss": 1}
    lines.append(metrics)
    metrics["loss"] = 2
    lines.close()
    assert read_json_lines(lines.path) == [{"loss": 1}]


def test_close_flushes_and_later_lines_go_nowhere(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m")
    lines.append({"a": 1})
    lines.close()
    lines.close()
    lines.append({"a": 2})
    lines.flush()
    assert read_json_lines(lines.path) == [{"a": 1}]


def test_lines_of_many_threads_arrive_whole_and_once(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m")

    def write(thread: int) -> None:
        for i in range(500):
            lines.append({"id": thread * 500 + i})
            if i % 7 == 0:
                lines.flush()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.close()
    assert sorted(line["id"] for line in read_json_lines(lines.path)) == list(range(2000))


def test_disk_full_while_appending_keeps_the_whole_lines(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m")
    line_bytes = len(encode_line({"step": 0, "pad": "x" * 100}))
    for step in range(5):
        lines.append({"step": step, "pad": "x" * 100})
    with files_limited_to(3 * line_bytes + 10):
        with pytest.raises(OSError, match="large"):
            lines.flush()
        assert Path(lines.path).stat().st_size == 3 * line_bytes  # the torn fourth line is cut off
        lines.append({"step": 5, "pad": "x" * 100})
        with pytest.raises(OSError, match="large"):
            lines.flush()
    assert lines.num_lost == 3
    lines.append({"step": 6})
    lines.close()
    assert [line["step"] for line in read_json_lines(lines.path)] == [0, 1, 2, 6]


def test_no_space_on_device_is_raised_and_counted() -> None:
    lines = JsonLines("/dev/full")
    lines.append({"a": 1})
    with pytest.raises(OSError, match="No space left") as raised:
        lines.flush()
    assert raised.value.errno == errno.ENOSPC
    assert lines.num_lost == 1
    assert len(lines) == 0
    lines.close()


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b'{"step": 3}', b"x" * 200_000])
def test_torn_last_line_is_ignored_and_cut_off_by_the_next_writer(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step":1}\n{"step":2}\n' + torn)
    assert [line["step"] for line in read_json_lines(path)] == [1, 2]
    lines = JsonLines(path)
    lines.append({"step": 4})
    lines.close()
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n{"step":4}\n'


def test_a_file_that_is_one_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step')
    lines = JsonLines(path)
    lines.append({"step": 1})
    lines.close()
    assert path.read_bytes() == b'{"step":1}\n'


def test_reading_skips_damage_and_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step":1}\n\x00\x00\x00\n[1]\n\n{"step":2}\n')
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]
    assert read_json_lines(tmp_path / "missing") == []
    assert read_json_lines(path / "below-a-file") == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff"])
def test_a_document_that_is_no_object_reads_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    assert read_json(tmp_path / "f") is None
    assert read_json(tmp_path / "missing") is None
