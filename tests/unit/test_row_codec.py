"""Rows as bytes and back, and rows.bin when it is torn, damaged or forged."""

import os
import random
import struct
import zlib

import numpy as np
import pytest

from paceline.data import from_numpy, row_codec
from paceline.data.row_codec import PLAIN, RUNS, Item, decoded, encoded_ids, spans_of
from paceline.data.row_log import RowLog
from paceline.data.row_names import hashed
from paceline.errors import RunDamagedError
from paceline.recording.row_spans import cover, nothing, union, up_to, without
from paceline.runs.rows_file import RowsFile, framed, read_rows_file


def expanded(spans):
    ranges = zip(spans.firsts.tolist(), spans.lasts.tolist(), strict=True)
    return [row for first, last in ranges for row in range(first, last + 1)]


def back(ids):
    message = decoded(row_codec.MESSAGE.pack(1, 1, 0) + encoded_ids(3, 5, np.array(ids, np.int64)))
    [item] = message.items
    assert (item.data, item.epoch) == (3, 5)
    return item, expanded(spans_of(item))


def some_ids(draw):
    least = draw.choice([0, 5, -(2**40), 2**62, -(2**63), 7 << 56])
    width = draw.choice([1, 200, 2**8, 2**16, 2**20, 2**33, 2**62])
    ids = [least + draw.randrange(width) for _ in range(draw.choice([1, 2, 50, 300]))]
    if draw.random() < 0.5:  # stretches
        ids = [min(one + place, 2**63 - 1) for one in ids[:9] for place in range(draw.choice([1, 40, 300]))]
    return ids


@pytest.mark.parametrize("seed", range(200))
def test_ids_come_back_in_order(seed):
    ids = some_ids(random.Random(seed))
    assert back(ids)[1] == ids


def test_ids_take_little_room():
    assert len(back(range(10**9, 10**9 + 5000))[0].content) < 20
    assert back(range(10))[0].kind == RUNS
    shuffled = [*range(2**16)]
    random.Random(0).shuffle(shuffled)
    item, ids = back(shuffled)
    assert (item.kind, ids) == (PLAIN, shuffled)
    assert len(item.content) < 2 * 2**16 + 20, "two bytes for each"


def test_far_apart_ids_come_back():
    assert back([-(2**63), 2**63 - 1, 0])[1] == [-(2**63), 2**63 - 1, 0]


FORGED = [
    Item(PLAIN, 0, 0, b""),
    Item(PLAIN, 0, 0, struct.pack("<qB", 0, 3) + b"123"),
    Item(PLAIN, 0, 0, struct.pack("<qB", 0, 8) + b"123"),
    Item(RUNS, 0, 0, struct.pack("<qBB", 0, 1, 0) + b"1"),
    Item(RUNS, 0, 0, struct.pack("<qBB", 0, 1, 1) + b"\0\0"),
    Item(RUNS, 0, 0, struct.pack("<qBB", 0, 1, 8) + b"\0" + b"\xff" * 8),
    Item(RUNS, 0, 0, struct.pack("<qBB", 2**63 - 1, 1, 1) + b"\0\x02"),
]


@pytest.mark.parametrize("item", FORGED)
def test_forged_item_is_an_error(item):
    with pytest.raises(ValueError, match=r"\w"):
        spans_of(item)


FORGED_MESSAGES = [
    b"",
    b"1234",
    bytes(20) + b"\x01",
    bytes(20) + row_codec.ITEM.pack(1, 0, 0, 2**32 - 1),
    bytes(20) + row_codec.ITEM.pack(9, 0, 0, 0),
]


@pytest.mark.parametrize("message", FORGED_MESSAGES)
def test_forged_message_is_an_error(message):
    with pytest.raises(ValueError, match=r"item|short"):
        decoded(message)


def test_billions_of_rows_in_a_row_take_no_room():
    item = Item(RUNS, 0, 0, struct.pack("<qBB", 0, 8, 4) + struct.pack("<QQII", 0, 2**31, 2**32 - 1, 2**32 - 1))
    seen = cover(*spans_of(item))
    assert (seen.num_rows, seen.counts.tolist()) == (2**31 + 2**32 - 1, [1, 2, 1])


# --- the file --------------------------------------------------------------------------------------------------------


def written(path, num_rows=3):
    file = RowsFile(path)
    file.append_begin({"number": 0, "world_size": 1, "first_id": 1, "iteration": 0})
    for number in range(num_rows):
        file.append_rows(0, number, b"rows" * number)
    file.close()
    return path.read_bytes()


def test_file_that_is_torn_at_any_byte_is_read_up_to_there_and_goes_on(tmp_path):
    path = tmp_path / "rows.bin"
    data = written(path)
    ends = [len(written(tmp_path / f"{num}.bin", num)) for num in range(4)]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        content = read_rows_file(path)
        whole = sum(end <= size for end in ends[1:])
        assert (len(content.messages), content.num_damaged) == (whole, 0)
        file = RowsFile(path)
        file.append_rows(1, 7, b"more")
        file.close()
        again = read_rows_file(path)
        assert again.messages == [*content.messages, (1, 7, b"more")]
        assert again.num_damaged == 0


def test_last_frame_that_a_crashed_machine_left_damaged_is_cut_off(tmp_path):
    path = tmp_path / "rows.bin"
    data = written(path)
    path.write_bytes(data[:-1] + b"\0")
    file = RowsFile(path)
    file.append_rows(1, 7, b"more")
    file.close()
    content = read_rows_file(path)
    assert ([rank for _, rank, _ in content.messages], content.num_damaged) == ([0, 1, 7], 0)


def test_damage_in_the_middle_is_still_there_when_the_run_goes_on(tmp_path):
    """All that came after it was cut off, and the audit of what was left was clean."""
    path = tmp_path / "rows.bin"
    data = written(path)
    place = len(written(tmp_path / "1.bin", 1)) + 9  # in the body of the second message
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    file = RowsFile(path)
    file.append_rows(1, 7, b"more")
    file.close()
    content = read_rows_file(path)
    assert ([rank for _, rank, _ in content.messages], content.num_damaged) == ([0, 2, 7], 1)


def test_any_wrong_byte_is_noticed_or_harms_nobody(tmp_path):
    path = tmp_path / "rows.bin"
    data = written(path)
    whole = read_rows_file(path)
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        content = read_rows_file(path)
        assert content.num_damaged or len(content.messages) < len(whole.messages)
        assert all(message in whole.messages for message in content.messages)


def test_forged_frames_are_damage(tmp_path):
    path = tmp_path / "rows.bin"
    for body in (
        b"X",
        b"R123",
        b"A",
        b"A[1]",
        b"A{}",
        b'A{"format":"paceline.rows","version":1,"number":"x"}',
        b"A" + b"[" * 10**5,
    ):
        path.write_bytes(framed(body))
        assert read_rows_file(path).num_damaged == 1
    path.write_bytes(struct.pack("<II", 2**32 - 1, 0) + b"x")
    assert read_rows_file(path).num_damaged == 1
    path.write_bytes(struct.pack("<II", 0, zlib.crc32(b"")))
    assert read_rows_file(path).num_damaged == 1


def test_only_files_are_read(tmp_path):
    (tmp_path / "outside").write_bytes(b"mine")
    run = tmp_path / "run"
    run.mkdir()
    assert read_rows_file(run / "rows.bin") is None
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to(tmp_path / "outside")):
        make(run / "rows.bin")
        with pytest.raises(RunDamagedError, match=r"rows\.bin cannot be read"):
            read_rows_file(run / "rows.bin")
        with pytest.raises(OSError, match=r"rows\.bin"):
            RowsFile(run / "rows.bin")
        assert (tmp_path / "outside").read_bytes() == b"mine"
        (run / "rows.bin").rmdir() if (run / "rows.bin").is_dir() else (run / "rows.bin").unlink()


# --- names of rows, and what waits -----------------------------------------------------------------------------------


def test_hash_of_a_text_does_not_depend_on_its_neighbours():
    texts = ["", "a", "b", "ab", "ba", "x" * 63, "x" * 64, "x" * 65, "y" * 300, "ä€😀", "a" * 8, "a" * 9]
    alone = [int(hashed(np.array([text], object))[0]) for text in texts]
    assert hashed(np.array(texts, object)).tolist() == alone
    assert hashed(np.array(texts)).tolist() == alone
    assert len({*alone}) == len(texts)
    many = hashed(np.array([f"row-{n:07}" for n in range(200_000)], object))
    assert len(np.unique(many)) == len(many)


def test_log_joins_the_batches_of_an_epoch_and_tells_when_many_wait():
    told = []
    log = RowLog(None, lambda: told.append(log.message(1, 1)))
    shard = log.shard("train|x", from_numpy({"x": np.arange(200_000)}), "train", 0, 1, lambda: 0)
    for _ in shard.iter_batches(1000):
        pass
    assert len(told) == 3
    messages = [decoded(message) for message in [*told, log.message(2, 4)]]
    assert log.message(2, 4) is None
    assert [message.number for message in messages] == [0, 1, 2, 3]
    items = [item for message in messages for item in message.items if item.kind == RUNS]
    assert len(items) == 4
    assert [row for item in items for row in expanded(spans_of(item))] == [*range(200_000)]


# --- stretches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_cover_counts_every_row(seed):
    draw = random.Random(seed)
    firsts = np.array([draw.randrange(60) for _ in range(draw.randrange(12))], np.int64)
    lasts = firsts + np.array([draw.randrange(9) for _ in firsts], np.int64)
    made = cover(firsts, lasts)
    rows = [row for first, last in zip(firsts, lasts, strict=True) for row in range(first, last + 1)]
    counts = {row: rows.count(row) for row in rows}
    shown = {
        row: count
        for start, stop, count in zip(*map(np.ndarray.tolist, made), strict=True)
        for row in range(start, stop)
    }
    assert shown == counts
    other = up_to([(10, 20), (40, 5)])
    assert set(without(made, other).some(999)) == set(counts) - {*range(10, 30), *range(40, 45)}
    assert set(union([made, other]).some(999)) == set(counts) | {*range(10, 30), *range(40, 45)}
    assert nothing().num_rows == 0
