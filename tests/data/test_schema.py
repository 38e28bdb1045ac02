"""The types of rows and their Parquet schemas are one declaration."""

from pathlib import Path

import pytest

from stages.context import StageError
from stages.data import schema
from stages.data.artifacts import read_parquet, write_parquet

COLUMNS = {
    schema.RolloutRow: """\
prompt_id: string not null
sample_index: int32 not null
greedy: bool not null
prompt: string not null
response: string not null
answer: string
extra: string not null
prompt_ids: list<item: int32> not null
  child 0, item: int32
response_ids: list<item: int32> not null
  child 0, item: int32
logprobs: list<item: float> not null
  child 0, item: float
support: list<item: list<item: int32>>
  child 0, item: list<item: int32>
      child 0, item: int32
loss_mask: list<item: int8>
  child 0, item: int8
seed: int64 not null
finish_reason: string not null
environment_reward: float
policy_hash: string not null""",
    schema.ScoreRow: """\
prompt_id: string not null
sample_index: int32 not null
reward: float not null
by_source: map<string, float> not null
  child 0, entries: struct<key: string not null, value: float> not null
      child 0, key: string not null
      child 1, value: float
ref_logprobs: list<item: float>
  child 0, item: float""",
    schema.ExperienceRow: """\
prompt_id: string not null
sample_index: int32 not null
role: string not null
reward: float not null
advantages: list<item: float>
  child 0, item: float""",
    schema.FeedbackLogprobsRow: """\
prompt_id: string not null
completion: float not null
other: float not null""",
    schema.PromptRow: """\
prompt_id: string not null
prompt: string not null
prompt_ids: list<item: int32> not null
  child 0, item: int32
answer: string
extra: string not null
row_id: string
source: string
line: int64
template: string""",
}


@pytest.mark.parametrize("kind", COLUMNS, ids=lambda kind: kind.__name__)
def test_the_columns_of_a_kind_are_its_fields_and_null_where_they_may_be_none(kind: type) -> None:
    assert schema.columns_of(kind).to_string() == COLUMNS[kind]


def test_a_column_that_is_not_required_is_there_only_where_rows_have_it(tmp_path: Path) -> None:
    score: schema.ScoreRow = {
        "prompt_id": "p",
        "sample_index": 0,
        "reward": 0.5,
        "by_source": [("game", 0.5)],
        "ref_logprobs": None,
    }
    without, having = tmp_path / "without.parquet", tmp_path / "having.parquet"
    write_parquet(without, [score], schema.ScoreRow)
    write_parquet(having, [{**score, "reward_by_turn": [0.25, 0.25]}], schema.ScoreRow)
    (plain,), (by_turn,) = (read_parquet(path, schema.ScoreRow) for path in (without, having))
    assert by_turn.keys() - plain.keys() == {"reward_by_turn"}
    assert list(plain) == schema.columns_of(schema.ScoreRow).names
    assert by_turn == {**plain, "reward_by_turn": [0.25, 0.25]}


def test_a_scored_rollout_is_a_rollout_and_its_score() -> None:
    both = schema.RolloutRow.__annotations__ | schema.ScoreRow.__annotations__
    assert schema.ScoredRollout.__annotations__ == both


def test_rows_are_read_as_the_kind_that_they_were_written_as(tmp_path: Path) -> None:
    score: schema.ScoreRow = {
        "prompt_id": "p",
        "sample_index": 0,
        "reward": 0.5,
        "by_source": [("verifier", 1.0)],
        "ref_logprobs": None,
    }
    write_parquet(tmp_path / "scores.parquet", [score], schema.ScoreRow)
    assert read_parquet(tmp_path / "scores.parquet", schema.ScoreRow) == [score]
    with pytest.raises(StageError, match=r"scores\.parquet has no column 'greedy'"):
        read_parquet(tmp_path / "scores.parquet", schema.RolloutRow)
