"""Bounded memory and the same bytes: what is written does not depend on how it is handed over."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.data import parquet_stream, schema
from stages.data.dialogue import digest
from stages.data.parquet_stream import streaming
from stages.data.seen import Seen

ROOT = Path(__file__).resolve().parents[2]


def row(number):
    return {
        "prompt_id": digest(str(number)).hex()[:16],
        "prompt": f"prompt {number}",
        "prompt_ids": list(range(number % 50)),
        "answer": None if number % 3 else str(number),
        "extra": "{}",
        "row_id": None,
        "source": "file",
        "line": number,
        "template": None,
    }


def written(path, rows, at_a_time, sorted_by=None):
    with streaming(
        path, schema.columns_of(schema.PromptRow), sorted_by, path.parent / "scratch"
    ) as stream:
        for start in range(0, len(rows), at_a_time):
            stream.write(rows[start : start + at_a_time])
    return path.read_bytes()


@pytest.mark.parametrize("sorted_by", [None, "prompt_id"])
@pytest.mark.parametrize("limits", [(100, 1 << 30), (10_000, 5000)])
def test_the_same_rows_give_the_same_bytes_however_many_are_handed_over_at_a_time(
    tmp_path, monkeypatch, sorted_by, limits
):
    monkeypatch.setattr(parquet_stream, "ROWS_IN_GROUP", limits[0])
    monkeypatch.setattr(parquet_stream, "BYTES_IN_GROUP", limits[1])
    rows = [row(number) for number in range(1000)]
    expected = written(tmp_path / "one.parquet", rows, 1000, sorted_by)
    for at_a_time in (1, 7, 333):
        path = tmp_path / f"{at_a_time}.parquet"
        assert written(path, rows, at_a_time, sorted_by) == expected
    assert pq.ParquetFile(tmp_path / "one.parquet").num_row_groups >= 10
    read = pq.read_table(tmp_path / "one.parquet").to_pylist()
    assert read == (sorted(rows, key=lambda r: r["prompt_id"]) if sorted_by else rows)


def test_sorted_bytes_do_not_depend_on_the_order_of_the_rows(tmp_path):
    rows = [row(number) for number in range(500)]
    forth = written(tmp_path / "forth.parquet", rows, 64, "prompt_id")
    assert written(tmp_path / "back.parquet", rows[::-1], 64, "prompt_id") == forth


def test_no_rows_are_a_file_with_its_columns(tmp_path):
    for sorted_by in (None, "prompt_id"):
        written(tmp_path / "none.parquet", [], 1, sorted_by)
        assert (
            pq.read_table(tmp_path / "none.parquet").column_names
            == schema.columns_of(schema.PromptRow).names
        )


@given(st.lists(st.integers(0, 5000), max_size=3000))
def test_a_digest_is_seen_if_it_was_added(numbers):
    seen, known = Seen(), set()
    for number in numbers:
        key = digest(str(number // 2))
        assert (key in seen) == (key in known)
        assert seen.add(key) == (key not in known)
        known.add(key)
    assert len(seen) == len(known)
    assert bytes(16) not in seen
    assert seen.add(bytes(16))
    assert bytes(16) in seen


PREPARE = """
import json, sys
from pathlib import Path
from tests.data.conftest import Prepared

for root in map(Path, sys.argv[1:]):
    metrics = Prepared(root, {}, held_out=0).run("prepare")
    # Not getrusage: a process starts there with the peak of the one that started it.
    peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    print(json.dumps([metrics["num_prompts"], int(peak) // 1024]))
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    """What a process takes at most, after a file of some row groups and after a much larger one."""
    megabytes = []
    for name, num_rows in (("small", 2000), ("large", 10_000)):
        path = tmp_path / name / "data/prompts.jsonl"
        path.parent.mkdir(parents=True)
        with path.open("w") as file:
            for number in range(num_rows):
                notes = digest(str(number)).hex() * 375
                file.write(json.dumps({"prompt": f"{number}?", "notes": notes}) + "\n")
        megabytes.append(path.stat().st_size >> 20)
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reported = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    (few, before), (many, after) = reported
    assert (few, many) == (2000, 10_000)
    growth = megabytes[1] - megabytes[0]
    assert growth > 90
    assert after - before < growth / 3, (reported, megabytes)
