"""What was found by attacking the data layer with files: links and pipes, damage, and what changes meanwhile."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.data import as_dataset, read_csv, read_json, read_parquet
from paceline.errors import ArgumentError, DataError


def ids_of(batches):
    return [int(number) for batch in batches for number in batch["id"]]


def write(path, num_rows=30, **columns):
    pq.write_table(pa.table(columns or {"id": np.arange(num_rows), "x": np.ones(num_rows)}), path, row_group_size=10)
    return path


# --- which files are read ---------------------------------------------------------------------------------------------


def test_folder_that_is_named_like_a_file_is_read(tmp_path):
    """As other tools write them. A pattern left them out, without a word."""
    write(tmp_path / "one.parquet")
    (tmp_path / "two.parquet").mkdir()
    write(tmp_path / "two.parquet" / "part.parquet")
    (tmp_path / "other").mkdir()
    assert read_parquet(tmp_path / "*.parquet").num_rows() == 60
    assert read_parquet(tmp_path / "**" / "*.parquet").num_rows() == 60
    assert read_parquet(tmp_path).num_rows() == 60


@pytest.mark.parametrize("where", ["", "two.parquet", "*.parquet"], ids=["folder", "path", "pattern"])
@pytest.mark.parametrize("what", ["link", "pipe"])
def test_what_is_no_file_is_not_left_out_silently(where, what, tmp_path):
    write(tmp_path / "one.parquet")
    path = tmp_path / "two.parquet"
    path.symlink_to("nowhere") if what == "link" else os.mkfifo(path)
    with pytest.raises(ArgumentError, match="leads nowhere" if what == "link" else "is not a file, but a pipe"):
        read_parquet(tmp_path / where)


def test_folder_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    write(tmp_path / "one.parquet")

    def walk(folder, onerror):
        onerror(PermissionError(13, "Permission denied", f"{folder}/closed"))
        return iter(())

    monkeypatch.setattr(os, "walk", walk)  # root may read anything
    with pytest.raises(ArgumentError, match=r"closed: this folder cannot be read: Permission denied"):
        read_parquet(tmp_path)


# --- files that change ------------------------------------------------------------------------------------------------

WRITTEN = {
    "parquet": (read_parquet, lambda path: write(path)),
    "csv": (read_csv, lambda path: path.write_text("id\n" + "".join(f"{number}\n" for number in range(30)))),
    "jsonl": (read_json, lambda path: path.write_text("".join(f'{{"id": {number}}}\n' for number in range(30)))),
}


@pytest.mark.parametrize("ending", WRITTEN)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path.unlink(), os.mkfifo(path)), "is not a file any more"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a file any more"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"has \d+ bytes now, and had \d+"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), r"has \d+ bytes now, and had \d+"),
        (lambda path: path.unlink(), r"is not there \(any more\)"),
    ],
    ids=["pipe", "folder", "longer", "shorter", "gone"],
)
def test_file_that_changes_between_epochs_is_told(ending, change, message, tmp_path):
    read, make = WRITTEN[ending]
    make(tmp_path / f"a.{ending}")
    shard = read(tmp_path / f"a.{ending}").get_split()
    assert len(ids_of(shard.iter_batches(7))) == 30
    change(tmp_path / f"a.{ending}")
    with pytest.raises(DataError, match=message):
        list(shard.iter_batches(7))


def test_counting_opens_no_pipe(tmp_path):
    import pyarrow.compute as pc

    data = read_parquet(write(tmp_path / "a.parquet"), lanes=1).filter(pc.field("id") > 3)
    (tmp_path / "a.parquet").unlink()
    os.mkfifo(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="is not a file any more"):
        data.tree.source.count_matching(data.tree.source.blocks()[0], [pc.field("id") > 3])


def test_lines_that_have_moved_are_not_read_torn(tmp_path):
    """A file that was written anew and is as long as before: numbers would be cut in two."""
    path = tmp_path / "a.csv"
    path.write_text("id\n" + "1234\n" * 40)
    shard = read_csv(path, block_bytes=50).get_split()
    assert ids_of(shard.iter_batches(7)) == [1234] * 40
    path.write_text("id\n" + "987654321\n" * 19 + "1234\n" * 2)
    with pytest.raises(DataError, match=r"a.csv: bytes \d+ to \d+ do not end with a line any more"):
        list(shard.iter_batches(7))


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "options", "error"),
    [
        (read_csv, {"sep": ";"}, "unexpected keyword argument 'sep'"),
        (read_json, {"newlines_in_values": True}, "unexpected keyword argument"),
        (read_csv, {"block_bytes": 0}, "block_bytes=0: expected a whole number"),
        (read_csv, {"block_bytes": "1"}, "block_bytes='1': expected a whole number"),
        (read_csv, {"delimiter": "ab"}, "delimiter='ab': expected one letter"),
        (read_csv, {"schema": {"id": "int"}}, r"expected a pyarrow\.Schema"),
    ],
)
def test_option_that_is_not_known_is_not_ignored(read, options, error, tmp_path):
    (tmp_path / "a.csv").write_text("id;x\n1;2\n")
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n')
    with pytest.raises((ArgumentError, TypeError), match=error):
        read(tmp_path, **options)


# --- what files hold --------------------------------------------------------------------------------------------------


def test_damaged_page_with_a_checksum_is_told(tmp_path):
    """Without one, a wrong bit in a page of numbers is another number."""
    path = tmp_path / "a.parquet"
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}
    pq.write_table(pa.table({"id": np.arange(1000)}), path, **options)
    content = bytearray(path.read_bytes())
    place = content.index(np.arange(400, 410).tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a.parquet: row group 0 cannot be read"):
        ids_of(read_parquet(path).iter_batches(64))


def test_columns_of_one_name_are_told(tmp_path):
    table = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4])], names=["a", "a"])
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("a,a\n1,2\n")
    for make in (
        lambda: as_dataset(table),
        lambda: read_parquet(tmp_path / "a.parquet"),
        lambda: read_csv(tmp_path / "a.csv"),
    ):
        with pytest.raises(DataError, match="has several columns named 'a'"):
            make()


def test_text_as_views_and_lists_without_values():
    table = pa.table(
        {"id": [2, 1], "t": pa.array(["a", "b"], pa.string_view()), "l": pa.array([[], []], pa.list_(pa.int64()))}
    )
    assert [one.to_pylist() for one in as_dataset(table).iter_batches(2, "pyarrow")] == [table.to_pylist()]
    [made] = as_dataset(table).map(lambda row: {"l": row["l"]}).iter_batches(2, "pyarrow")
    assert made.to_pylist() == [{"l": []}, {"l": []}]


def test_text_that_is_none_is_told(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 1, "t": "a\xed"}\n')
    with pytest.raises(DataError, match=r"a.jsonl: its beginning cannot be read.*UTF8"):
        read_json(tmp_path)
    text = pa.array([b"a\xed", b"b"]).view(pa.string())
    pq.write_table(pa.table({"t": text}), tmp_path / "a.parquet")
    for data in (read_parquet(tmp_path / "a.parquet"), read_parquet(tmp_path / "a.parquet").map(lambda row: row)):
        with pytest.raises(DataError, match=r"Text that is no UTF-8 cannot be read"):
            list(data.iter_batches(2))
