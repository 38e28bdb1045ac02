"""An evaluation as a folder: what is written is what is read back.

It is read by the evaluations that are compared with it, by the report and by `lockstep samples`, so
that a response is generated, judged and scored once.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.data import schema
from stages.data.artifacts import read_parquet, write_parquet
from stages.evaluation.answers import Answer, Answered
from stages.evaluation.contest import Contest

GREEDY = "samples.parquet"
SAMPLED = "sampled.parquet"
TASKS = "tasks.parquet"


def write(
    folder: Path,
    answered: Sequence[Answered],
    contest: Contest | None,
    by_task: Sequence[Mapping[str, Any]],
) -> None:
    """The greedy responses, the sampled ones, and the numbers of each task."""
    folder.mkdir()
    write_parquet(folder / GREEDY, greedy_rows(answered, contest), schema.EvaluationRow)
    write_parquet(folder / SAMPLED, _sampled_rows(answered), schema.EvaluationSampledRow)
    write_parquet(folder / TASKS, by_task, schema.EvaluationTaskRow)


def read(folder: Path) -> list[Answered]:
    """The answers in a folder."""
    sampled: Mapping[str, list[Answer]] = defaultdict(list)
    for row in read_parquet(folder / SAMPLED, schema.EvaluationSampledRow):
        sampled[row["prompt_id"]].append(_answer(row, row["vote"]))
    return [
        replace(item, sampled=tuple(sampled[item.prompt_id]))
        for item in read_greedy(folder / GREEDY)
    ]


def read_greedy(path: Path) -> list[Answered]:
    """The greedy answers of a table, without the sampled ones."""
    return [
        Answered(row["prompt_id"], row["prompt"], row["answer"], row["task"], _answer(row), ())
        for row in read_parquet(path, schema.EvaluationRow)
    ]


def greedy_rows(answered: Sequence[Answered], contest: Contest | None) -> list[dict[str, Any]]:
    """One row per prompt, beside the reference's reward where there is one."""
    return [
        {
            "prompt_id": item.prompt_id,
            "prompt": item.prompt,
            "answer": item.answer,
            "task": item.task,
            "pass_rate": item.pass_rate,
            "reference_reward": contest.theirs[index].greedy.reward if contest else None,
            "won": contest.won[index] if contest else None,
            **{name: value for name, value in vars(item.greedy).items() if name != "vote"},
        }
        for index, item in enumerate(answered)
    ]


def _sampled_rows(answered: Sequence[Answered]) -> list[dict[str, Any]]:
    return [
        {"prompt_id": item.prompt_id, "sample_index": index, **vars(answer)}
        for item in answered
        for index, answer in enumerate(item.sampled)
    ]


def _answer(row: Mapping[str, Any], vote: str | None = None) -> Answer:
    return Answer(
        row["response"], row["finish_reason"], row["length"], row["reward"], row["correct"], vote
    )
