"""An evaluation task by task.

A prompt's task is `task` of its source row, carried in `extra`. Every task has its row in the
table; the largest ones have metrics of their own, `accuracy/TASK`, under names that any tracker
takes and that do not depend on which other tasks there are.
"""

import hashlib
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stages.context import StageError
from stages.data import schema
from stages.evaluation.answers import Answered
from stages.evaluation.contest import Contest
from stages.evaluation.measures import Numbers, quality, win_rate
from stages.standard_error import error_metric, standard_error

AS_METRICS = ("accuracy", "win_rate")
_PLAIN = re.compile(r"[\w-][\w. -]{0,63}", re.ASCII)
_ODD = re.compile(r"[^\w. -]", re.ASCII)


def task_of(row: Mapping[str, Any]) -> str | None:
    """The task that a prompt's row names, if it does."""
    task = json.loads(row["extra"]).get("task")
    if task is None or (isinstance(task, str) and task):
        return task
    raise StageError(
        f"prompt {row['prompt_id']} ({row['prompt']!r}) has the task {json.dumps(task)}: make "
        "`task` in its row of the data a text, or leave it out"
    )


def breakdown(answered: Sequence[Answered], contest: Contest | None) -> list[dict[str, Any]]:
    """The rows of tasks.parquet."""
    places: dict[str | None, list[int]] = {}
    for place, item in enumerate(answered):
        places.setdefault(item.task, []).append(place)
    if not places.keys() - {None}:
        return []
    by_name = sorted(places.items(), key=lambda entry: (entry[0] is None, entry[0] or ""))
    return [_row(task, of, answered, contest) for task, of in by_name]


def task_metrics(rows: Sequence[Mapping[str, Any]], most: int) -> Numbers:
    """Metrics of the tasks with the most prompts; of two with as many, the first by name."""
    named = [row for row in rows if row["task"] is not None]
    largest = sorted(named, key=lambda row: (-row["num_prompts"], row["task"]))[:most]
    return {
        f"{name}/{metric_name(row['task'])}": row[name]
        for row in sorted(largest, key=lambda row: row["task"])
        for name in AS_METRICS
        if row[name] is not None
    }


def metric_name(task: str) -> str:
    """The task as part of a metric's name: itself, or what is left of it and a hash of the rest."""
    if _PLAIN.fullmatch(task) and task == task.strip():
        return task
    digest = hashlib.sha256(task.encode()).hexdigest()[:6]
    return f"{_ODD.sub('_', task)[:48].strip(' .')}-{digest}"


def _row(
    task: str | None, places: Sequence[int], answered: Sequence[Answered], contest: Contest | None
) -> dict[str, Any]:
    items = [answered[place] for place in places]
    sampled = [answer for item in items for answer in item.sampled]
    rewards = [answer.reward for answer in sampled]
    prompts = [item.prompt_id for item in items for _ in item.sampled]
    numbers: dict[str, Any] = {
        "task": task,
        "num_prompts": len(items),
        "num_judged": sum(item.is_judged for item in items),
        "reward_mean": statistics.fmean(rewards),
        **error_metric("reward_mean", standard_error(rewards, prompts)),
        "response_length": statistics.fmean(answer.length for answer in sampled),
        **quality(items),
        **(win_rate([contest.won[place] for place in places]) if contest else {}),
    }
    return {name: numbers.get(name) for name in schema.EvaluationTaskRow.__annotations__}
