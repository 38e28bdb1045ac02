"""Files of every type as streams of numbered rows, and what is wrong with them by row."""

import bz2
import gzip
import json
import lzma

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.context import StageError
from stages.contracts.sources import Source
from stages.data.formats import files
from stages.data.formats.files import counted_in, hub_rows, rows_of
from stages.data.row_error import RowError
from tests.data.conftest import write_rows

ROWS = [
    {"prompt": "é\n\"quoted\", 'so'", "label": True, "list": [1, {"a": None}]},
    {"prompt": "x" * 5000, "label": False, "list": []},
    {"prompt": "]}[{", "label": True, "list": [2]},
]
TEXTS = [{name: row[name] for name in ("prompt", "label")} for row in ROWS]
PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda text: pa.compress(text, "zstd", asbytes=True),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_rows_come_back_as_they_were_written(tmp_path, name):
    path = write_rows(tmp_path / name, TEXTS)
    assert list(rows_of(path)) == list(enumerate(TEXTS, start=1))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_list_is_read_piece_by_piece_wherever_the_pieces_end(tmp_path, monkeypatch, name, chunk):
    monkeypatch.setattr(files, "CHUNK", chunk)
    path = write_rows(tmp_path / name, ROWS * 3)
    assert [row for _, row in rows_of(path)] == ROWS * 3


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_cells_of_a_table_are_text_and_numbered_by_the_line_that_they_start_on(tmp_path, name):
    path = write_rows(tmp_path / name, TEXTS)
    numbered = list(rows_of(path))
    assert [number for number, _ in numbered] == [2, 4, 5]
    assert [row["prompt"] for _, row in numbered] == [row["prompt"] for row in TEXTS]
    assert [row["label"] for _, row in numbered] == ["True", "False", "True"]


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(TEXTS)),
        ("a.json", "\n".join(map(json.dumps, TEXTS))),
        ("a.jsonl", "\n".join(map(json.dumps, TEXTS))),
    ],
)
def test_a_packed_file_is_read_like_what_is_in_it(tmp_path, kind, name, text):
    path = tmp_path / f"{name}.{kind}"
    path.write_bytes(PACK[kind](text.encode()))
    assert list(rows_of(path)) == list(enumerate(TEXTS, start=1))
    assert counted_in(path) == ("row" if text.startswith("[") else "line")


@pytest.mark.parametrize("kind", PACK)
def test_a_packed_file_that_was_cut_is_refused(tmp_path, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(PACK[kind](b'{"a": 1}\n' * 999)[:-9])
    with pytest.raises(StageError, match=rf"a\.jsonl\.{kind} cannot be read"):
        list(rows_of(path))


def test_an_empty_cell_is_none(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion\na,\n")
    assert list(rows_of(tmp_path / "a.csv")) == [(2, {"prompt": "a", "completion": None})]


def test_a_json_file_of_lines_is_read_as_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert list(rows_of(path)) == [(1, {"prompt": "a"}), (3, {"prompt": "b"})]


def stream_of(rows):
    """An Arrow stream of batches of one row, and where each batch of it ends."""
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as out:
        ends = []
        for batch in table.to_batches(max_chunksize=1):
            out.write_batch(batch)
            ends.append(sink.tell())
    return sink.getvalue().to_pybytes(), ends


def test_a_stream_is_read_to_its_end_mark_and_refused_where_that_is_missing(tmp_path):
    content, ends = stream_of(TEXTS)
    path = tmp_path / "a.arrow"
    for end in ends:
        path.write_bytes(content[:end])
        with pytest.raises(StageError, match=r"a\.arrow was cut: its end mark is missing"):
            list(rows_of(path))
    path.write_bytes(content)
    assert [row for _, row in rows_of(path)] == TEXTS
    path.write_bytes(content * 2)
    with pytest.raises(StageError, match=r"a\.arrow goes on after the end of its stream"):
        list(rows_of(path))


def test_a_stream_without_rows_ends_too(tmp_path):
    empty = pa.Table.from_pylist(TEXTS).slice(0, 0)
    with (tmp_path / "a.arrow").open("wb") as file, pa.ipc.new_stream(file, empty.schema):
        pass
    assert list(rows_of(tmp_path / "a.arrow")) == []


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize(
    ("kind", "far"),
    [
        (pa.timestamp("s"), 1 << 50),
        (pa.timestamp("us", "UTC"), 1 << 60),
        (pa.date64(), 1 << 50),
        (pa.duration("s"), 1 << 60),
    ],
    ids=str,
)
def test_a_time_that_no_calendar_has_is_named_with_its_row_and_column(tmp_path, name, kind, far):
    when = pa.array([0, far, 86_400_000], pa.int64()).view(kind)
    table = pa.table({"prompt": ["a", "b", "c"], "when": when})
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(table, path)
    else:
        with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
    (_, first), (number, bad), (_, last) = rows_of(path)
    assert (first["prompt"], last["prompt"]) == ("a", "c")
    assert number == 2
    assert isinstance(bad, RowError)
    assert "'when' is " in str(bad)


def test_a_zone_that_nobody_knows_is_named_with_its_column(tmp_path):
    when = pa.array([0], pa.int64()).view(pa.timestamp("s", "Mars/Phobos"))
    pq.write_table(pa.table({"when": when}), tmp_path / "a.parquet")
    [(_, bad)] = rows_of(tmp_path / "a.parquet")
    assert "'when' is timestamp[" in str(bad)


@pytest.mark.parametrize(
    ("name", "content", "number", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', 2, "not JSON"),
        ("a.jsonl", b'{"a": 1}\n"a"\n', 2, "not a JSON object"),
        ("a.jsonl", b'{"a": 1}\n\xff\n', 2, "not UTF-8"),
        ("a.json", b'[{"a": 1}, 5]', 2, "not a JSON object"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", 3, "3 cells"),
        ("a.csv", b"a,b\n1,2\n1,\xff\n", 3, "save the file as UTF-8"),
        ("a.jsonl", b'{"a": 1}\n{"a": 1, "a": 2}\n', 2, "'a' twice"),
        ("a.json", b'[{"a": 1}, {"b": {"a": 1, "a": 2}}, {"a": 3}]', 2, "'a' twice"),
        ("a.jsonl", b'{"a": 1}\n{"a": ' + b"[" * 100_000, 2, "cannot be read"),
        ("a.jsonl", b'{"a": 1}\n{"a": ' + b"1" * 5000 + b"}", 2, "cannot be read"),
    ],
)
def test_a_bad_row_is_numbered_and_the_others_are_still_read(
    tmp_path, name, content, number, message
):
    (tmp_path / name).write_bytes(content)
    [(bad, error)] = [entry for entry in rows_of(tmp_path / name) if isinstance(entry[1], RowError)]
    assert bad == number
    assert message in str(error)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"a": 1}, {"a": ', r"a\.json row 2 is not JSON"),
        ("a.json", b'[{"a": 1} {"a" 1}]', r"a\.json row 2 is not JSON"),
        ("a.json", b'[{"a": 1}', r"the list is not closed"),
        ("a.json", b'[{"a": 1}][{"a": 2}]', r"a\.json goes on after the end of its list"),
        ("a.json", b'[{"a": 1}]' + b" " * 100 + b"and", r"goes on .* with 'and'"),
        ("a.json", b'[{"a": ' + b"[" * 100_000, r"a\.json row 1 cannot be read"),
        ("a.jsonl.gz", b'{"a": 1}', r"a\.jsonl\.gz cannot be read"),
        ("a.csv.gz", gzip.compress(b"a,b\n" * 999, mtime=0)[:40], r"a\.csv\.gz cannot be read"),
        ("a.csv", b"a,\xff\n1,2\n", r"a\.csv line 1 is not UTF-8"),
        ("a.json", b"5", r"a\.json holds no list"),
        ("a.json", b'[{"a": "\xff"}]', r"a\.json is not UTF-8"),
        ("a.csv", b'a,b\n1,"2\n', r"a\.csv line 2 is not CSV"),
        ("a.csv", b"a,a\n1,2\n", r"a\.csv: its first line names the columns"),
        ("a.parquet", b"PAR0", r"a\.parquet cannot be read"),
        ("a.arrow", b"ARROW0", r"a\.arrow cannot be read"),
        ("a.txt", b"a", r"a\.txt is no file of a type that is read: \.json"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StageError, match=message):
        list(rows_of(tmp_path / name))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "lines.json", "a.csv"])
def test_a_mark_of_the_encoding_is_no_part_of_the_text(tmp_path, name):
    path = write_rows(tmp_path / name, [{"prompt": "a"}])
    if name == "lines.json":
        path.write_text('{"prompt": "a"}\n')
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [row for _, row in rows_of(path)] == [{"prompt": "a"}]


def test_what_a_number_counts_is_lines_where_there_are_any(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "lines.json").write_text('\n{"a": 1}')
    names = ("a.jsonl", "a.csv.gz", "a.parquet", "list.json", "lines.json")
    counted = [counted_in(tmp_path / name) for name in names]
    assert counted == ["line", "line", "row", "row", "line"]


def test_a_table_names_the_row_that_is_no_text_and_a_column_that_is_there_twice(tmp_path):
    offsets, letters = np.array([0, 1, 2, 3], "int32").tobytes(), b"a\xffc"
    column = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(letters))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    first, bad, last = (row for _, row in rows_of(tmp_path / "a.parquet"))
    assert (first, last) == ({"text": "a"}, {"text": "c"})
    assert isinstance(bad, RowError)
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    path = str(tmp_path / "a.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, twice.schema) as out:
        out.write_table(twice)
    [(number, error)] = rows_of(tmp_path / "a.arrow")
    assert number == 1
    assert "two columns 'text'" in str(error)


def test_a_broken_list_is_not_read_to_its_end_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_ROW", 4096)
    monkeypatch.setattr(files, "CHUNK", 1024)
    (tmp_path / "a.json").write_text('[{"a": "never closed' + " and on" * 100_000)
    with pytest.raises(StageError, match="row 1 is not JSON"):
        list(rows_of(tmp_path / "a.json"))


def test_a_dataset_is_read_through_the_datasets_package(tmp_path, monkeypatch):
    """A folder in place of a hub: the same call, without a network."""
    pytest.importorskip("datasets")
    (tmp_path / "owner/name").mkdir(parents=True)
    write_rows(tmp_path / "owner/name/train.jsonl", TEXTS)
    write_rows(tmp_path / "owner/name/test.jsonl", TEXTS[:1])
    monkeypatch.chdir(tmp_path)
    pinned = {"dataset": "owner/name", "revision": "a" * 40}
    assert list(hub_rows(Source(**pinned))) == list(enumerate(TEXTS, start=1))
    assert list(hub_rows(Source(**pinned, split="test"))) == [(1, TEXTS[0])]
    assert Source(**pinned).label == "owner/name@aaaaaaaaaaaa:train"
    with pytest.raises(StageError, match=r"cannot be read .*`path`"):
        list(hub_rows(Source(**pinned, split="nothing")))


def test_a_hub_is_asked_for_the_commit(monkeypatch):
    """No hub is reachable from a test, and a folder has no commits: the call is written down."""
    datasets = pytest.importorskip("datasets")
    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *names, **how: asked.append((names, how)) or TEXTS
    )
    source = Source(dataset="owner/name", revision="b" * 40, subset="main", split="test")
    assert [row for _, row in hub_rows(source)] == TEXTS
    how = {"revision": "b" * 40, "split": "test", "streaming": True}
    assert asked == [(("owner/name", "main"), how)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"dataset": "owner/name"}, "needs a `revision`"),
        ({"dataset": "owner/name", "revision": "main"}, "needs a `revision`"),
        ({"path": "a.jsonl", "revision": "a" * 40}, "`revision` is for a `dataset`"),
        ({"path": "a.jsonl", "dataset": "owner/name"}, "either `path` or `dataset`"),
        ({}, "either `path` or `dataset`"),
        ({"path": "/etc/passwd"}, "leaves prepare.folder"),
        ({"path": "../a.jsonl"}, "leaves prepare.folder"),
        ({"path": "a.jsonl", "columns": {"a": "prompt", "b": "prompt"}}, "same name"),
        ({"path": "a.jsonl", "format": "alpca"}, "'alpaca'"),
    ],
)
def test_a_source_that_means_nothing_definite_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        Source.model_validate(source)
