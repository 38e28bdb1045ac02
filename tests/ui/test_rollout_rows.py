"""Rows are found without reading what a filter or a page does not need."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.base.errors import LockstepError
from pipelines.ui import small_groups
from pipelines.ui.rollout_files import RolloutFiles
from pipelines.ui.rollout_filter import Wanted, find
from pipelines.ui.rollout_rows import one, open_tables, page
from pipelines.ui.small_groups import best_copy
from pipelines.ui.tokens import turns_of
from stages.data import schema
from tests.lineage.world import experience_row, rollout_row, score_row
from tests.waiting import until

NUM_ROWS, IN_GROUP = 600, 50


def reward(number: int) -> float:
    """Rising, so that each row group has a range of its own."""
    return float(number)


def write(path: Path, rows: list[dict[str, Any]], kind: Any, in_group: int) -> None:
    table = pa.Table.from_pylist(rows, schema=schema.columns_of(kind))
    pq.write_table(table, path, row_group_size=in_group, compression="zstd")


@pytest.fixture
def files(tmp_path: Path) -> RolloutFiles:
    """Rollouts in row groups of 50, their scores in groups of 70; one row in three was used."""
    prompts = [f"prompt {number // 2}" for number in range(NUM_ROWS)]
    rollouts, scores, used = [], [], []
    for number, prompt in enumerate(prompts):
        said = f"Needle {number}" if number % 97 == 5 else f"hay {number}"
        ids = [1] * (1 + number % 7)
        row = rollout_row(prompt, number % 2, said, response_ids=ids, logprobs=[-0.5] * len(ids))
        rollouts.append(
            {**row, "prompt_id": f"{number // 2:016x}", "finish_reason": finish(number)}
        )
        score = score_row(prompt, number % 2, reward(number))
        sources = [("verifier", float(number % 3)), ("style", -1.0)]
        scores.append({**score, "prompt_id": f"{number // 2:016x}", "by_source": sources})
        if number % 3 == 0:
            row = experience_row(prompt, number % 2, "policy_gradient", advantages=[0.5] * len(ids))
            used.append({**row, "prompt_id": f"{number // 2:016x}"})
    found = RolloutFiles(
        "iter_001",
        "rollouts@iter_001",
        "sft",
        tmp_path / "rollouts.parquet",
        tmp_path / "scores.parquet",
        tmp_path / "experience.parquet",
        None,
        tmp_path / "copies",
    )
    assert found.scores is not None
    assert found.experience is not None
    write(found.rollouts, rollouts, schema.RolloutRow, IN_GROUP)
    write(found.scores, scores, schema.ScoreRow, 70)
    write(found.experience, used, schema.ExperienceRow, 40)
    return found


def finish(number: int) -> str:
    return "length" if number % 11 == 0 else "stop"


def spoil(path: Path, kept: set[int], in_group: int) -> None:
    """Destroy all row groups but those that have one of the rows."""
    metadata, raw = pq.ParquetFile(path).metadata, bytearray(path.read_bytes())
    for index in range(metadata.num_row_groups):
        if kept & set(range(index * in_group, (index + 1) * in_group)):
            continue
        group = metadata.row_group(index)
        for column in map(group.column, range(group.num_columns)):
            first = column.dictionary_page_offset or column.data_page_offset
            raw[first : first + column.total_compressed_size] = (
                b"\xff" * column.total_compressed_size
            )
    path.write_bytes(raw)


CASES: list[tuple[Wanted, Callable[[int], bool]]] = [
    (Wanted(), lambda _: True),
    (Wanted(text="nEEDLE"), lambda number: number % 97 == 5),
    (Wanted(text="prompt 7"), lambda number: f"prompt {number // 2}".startswith("prompt 7")),
    (Wanted(prompt=f"{40:016x}"), lambda number: number // 2 == 40),
    (Wanted(prompt=f"{0:013x}"), lambda _: True),
    (Wanted(finish="length"), lambda number: number % 11 == 0),
    (Wanted(reward_min=100, reward_max=130), lambda number: 100 <= number <= 130),
    (Wanted(reward_max=3.5), lambda number: number <= 3),
    (Wanted(source="verifier", reward_min=2), lambda number: number % 3 == 2),
    (Wanted(source="nobody", reward_min=0), lambda _: False),
    (Wanted(length_min=6), lambda number: number % 7 >= 5),
    (Wanted(trained=True), lambda number: number % 3 == 0),
    (Wanted(trained=False), lambda number: number % 3 != 0),
    (
        Wanted(text="hay", reward_min=99, length_max=2, finish="stop", trained=True),
        lambda n: n % 97 != 5 and n >= 99 and n % 7 < 2 and n % 11 != 0 and n % 3 == 0,
    ),
]


@pytest.mark.parametrize(("wanted", "passes"), CASES)
def test_pages_one_after_the_other_have_exactly_the_rows_that_pass(
    files: RolloutFiles, wanted: Wanted, passes: Callable[[int], bool]
) -> None:
    tables, rows, start = open_tables(files), list[int](), 0
    while start is not None:
        found = find(tables, wanted, start, 7)
        assert len(found.rows) <= 7
        rows += found.rows
        start = found.next  # type: ignore[assignment]
    assert rows == [number for number in range(NUM_ROWS) if passes(number)]
    assert [row["row"] for row in page(files, wanted, 0, 3)["rows"]] == rows[:3]


def test_a_search_whose_time_is_over_goes_on_where_it_stopped(files: RolloutFiles) -> None:
    tables, rows, start, searches = open_tables(files), list[int](), 0, 0
    while start is not None:
        found = find(tables, Wanted(text="needle"), start, 100, seconds=0)
        rows += found.rows
        start, searches = found.next, searches + 1  # type: ignore[assignment]
    assert rows == list(range(5, NUM_ROWS, 97))
    assert searches == NUM_ROWS // IN_GROUP


def test_a_page_reads_no_row_group_but_its_own(files: RolloutFiles) -> None:
    assert files.scores is not None
    spoil(files.rollouts, set(range(300, 320)), IN_GROUP)
    spoil(files.scores, set(range(300, 320)), 70)
    shown = page(files, Wanted(), 300, 20)["rows"]
    assert [row["reward"] for row in shown] == [reward(number) for number in range(300, 320)]
    assert [bool(row["used"]) for row in shown] == [number % 3 == 0 for number in range(300, 320)]
    with pytest.raises(LockstepError, match="lockstep verify"):
        page(files, Wanted(), 0, 20)


def test_row_groups_that_statistics_rule_out_are_not_read(files: RolloutFiles) -> None:
    assert files.scores is not None
    wanted = set(range(400, 410))
    spoil(files.rollouts, wanted, IN_GROUP)
    spoil(files.scores, wanted, 70)
    tables = open_tables(files)
    assert find(tables, Wanted(reward_min=400, reward_max=409), 0, 100).rows == (*range(400, 410),)
    assert find(tables, Wanted(prompt=f"{202:016x}"), 0, 100).rows == (404, 405)


def test_a_row_has_what_was_said_of_it_alone(files: RolloutFiles) -> None:
    row = one(files, 303, 0)
    assert (row["response"], row["reward"], row["sample_index"]) == ("hay 303", 303.0, 1)
    assert [each["advantage"] for each in row["tokens"]] == [0.5] * (1 + 303 % 7)
    assert [each["row"] for each in row["group"]] == [302, 303]
    assert one(files, 304, 0)["used"] == []
    with pytest.raises(LockstepError, match=r"rows 0 to 599, no row 600"):
        one(files, 600, 0)


def test_scores_of_other_rollouts_are_refused(files: RolloutFiles, tmp_path: Path) -> None:
    assert files.scores is not None
    rows = pq.ParquetFile(files.scores).read().to_pylist()
    other = tmp_path / "other.parquet"
    write(
        other,
        [{**row, "sample_index": 1 - row["sample_index"]} for row in rows],
        schema.ScoreRow,
        70,
    )
    for wrong in (other, _shorter(rows, tmp_path)):
        with pytest.raises(LockstepError, match="other rollouts"):
            page(replace(files, scores=wrong), Wanted(), 0, 10)


def _shorter(rows: list[dict[str, Any]], folder: Path) -> Path:
    write(folder / "shorter.parquet", rows[:-1], schema.ScoreRow, 70)
    return folder / "shorter.parquet"


def test_turns_are_told_apart_by_who_said_them() -> None:
    turns = turns_of(7, [1, 1, 0, 0, 1, 1, 0], [1, 5], [0.5, 1.0], [])
    told = [(turn["role"], turn["start"], turn["stop"], turn["reward"]) for turn in turns]
    assert told == [
        ("policy", 0, 2, 0.5),
        ("environment", 2, 4, None),
        ("policy", 4, 6, 1.0),
        ("environment", 6, 7, None),
    ]
    assert [turn["role"] for turn in turns_of(3, None, [], [], [])] == ["policy"]


def test_a_file_with_a_large_row_group_is_read_from_a_copy_with_the_same_rows(
    files: RolloutFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_groups, "LARGE", 60)
    monkeypatch.setattr(small_groups, "GROUP", 16)
    assert files.scores is not None
    written, expected = files.scores.read_bytes(), pq.read_table(files.scores)
    assert page(files, Wanted(), 60, 20)["total"] == NUM_ROWS  # of the file itself, meanwhile
    until(lambda: best_copy(files.scores, files.copies) != files.scores, "a copy")
    copy = best_copy(files.scores, files.copies)
    shown = open_tables(files).scores
    assert shown is not None
    assert shown.num_row_groups == pq.ParquetFile(copy).num_row_groups == -(-NUM_ROWS // 16)
    assert shown.read().equals(expected)
    assert files.scores.read_bytes() == written
    # Groups of 50 rows are small enough.
    assert best_copy(files.rollouts, files.copies) == files.rollouts
    # Of a file that was written anew, the copy is not shown.
    write(files.scores, expected.to_pylist()[:-1], schema.ScoreRow, 70)
    assert best_copy(files.scores, files.copies) == files.scores
