"""The record of what environments answered, which a later run reads instead of asking them.

A *request* is all that an answer may depend on: the name of the environment, the row and the seed
that its episode began with, and the actions so far. Its id is a hash over them. Answers are rows in
the order of the samples, and when and how fast an environment answered is not in them: the same
answers give the same bytes.

A tool may be no function of the request and answer two samples differently. So a sample first finds
what it was answered itself; where that is not recorded, what another sample was, to the same
request.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.context import Context, StageError
from stages.contracts.rollout import Tools
from stages.data.finite import sample_name
from stages.data.schema import ToolAnswerRow, columns_of
from stages.engines.generation.generator import Completion
from stages.environments.environment import NoAnswer, Observation
from stages.environments.observations import read_back

SLOWEST = 100
"""Rows of the table with times."""
_ANSWER = ("text", "reward", "done", "error", "ids")


def first_request(environment: str, row: Mapping[str, Any], seed: int) -> str:
    """The id of the request to begin an episode."""
    return _digest([environment, row, seed])


def next_request(before: str, action: str) -> str:
    """The id of the request that an action is, after the one before it."""
    return _digest([before, action])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


@dataclass
class Answers:
    """Of one episode, so far."""

    sample: Mapping[str, Any]
    """Its `iteration`, `prompt_id` and `sample_index`."""
    seed: int
    """The environment's."""
    request: str
    """The latest."""
    with_ids: bool = False
    """Whether answers may be ids."""
    rows: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, action: str | None) -> None:
        """The next request; None: to begin."""
        if action is not None:
            self.request = next_request(self.request, action)

    def add(
        self, action: str | None, answer: Observation | NoAnswer, seconds: float | None
    ) -> None:
        """What was answered; `seconds` is None where nobody was asked."""
        failed = isinstance(answer, NoAnswer)
        said = Observation() if isinstance(answer, NoAnswer) else answer
        answered = {**vars(said), "error": str(answer) if failed else None}
        if not self.with_ids:
            del answered["ids"]
        known = {"turn": len(self.rows), "seed": self.seed, "request": self.request}
        text = None if action is None else str(action)
        self.rows.append({**known, "action": text, **answered, "seconds": seconds})

    def is_recorded(self, turn: int) -> bool:
        """Whether what was answered in a turn came from the record."""
        return self.rows[turn]["seconds"] is None

    @property
    def actions(self) -> list[str]:
        """Those that were answered."""
        return [row["action"] for row in self.rows[1:]]


class Record:
    """The answers of earlier runs, in a folder."""

    def __init__(self, tools: Tools, folder: Path) -> None:
        self._tools, self._folder = tools, folder
        self._of_sample: dict[tuple[Any, ...], ToolAnswerRow] = {}
        self._of_any: dict[str, ToolAnswerRow] = {}

    def read(self) -> None:
        """All of it; StageError where there is none to replay."""
        if self._tools is Tools.LIVE:
            return
        files = sorted(self._folder.rglob("*.parquet"))
        if not files and self._tools is Tools.REPLAY:
            raise StageError(
                f"rollout.tools is replay, but there is no record (*.parquet) in {self._folder}: "
                "copy artifacts/tool_answers of the run that recorded it there, or set "
                "rollout.tools: record"
            )
        for file in files:
            for row in _rows(file):
                self._add(row, file)

    def find(self, answers: Answers, action: str | None) -> Observation | NoAnswer | None:
        """The recorded answer to the latest request; None: ask. StageError where that is not
        allowed."""
        if self._tools is Tools.LIVE:
            return None
        row = self._of_sample.get((*answers.sample.values(), answers.request))
        row = row or self._of_any.get(answers.request)
        if row is None:
            if self._tools is Tools.REPLAY:
                raise StageError(self._lacks(answers, action))
            return None
        if row["error"] is not None:
            return NoAnswer(row["error"])
        return read_back(row)

    def _add(self, row: ToolAnswerRow, file: Path) -> None:
        if row["error"] is not None and self._tools is Tools.RECORD:
            return  # it is worth another try
        key = (row["iteration"], row["prompt_id"], row["sample_index"], row["request"])
        known = self._of_sample.setdefault(key, row)
        if any(known.get(name) != row.get(name) for name in _ANSWER):
            raise StageError(
                f"{file}: another file in {self._folder} has another answer to turn {row['turn']} "
                f"of {sample_name(row)} of {row['iteration']}: keep the record of one run there"
            )
        self._of_any.setdefault(row["request"], row)

    def _lacks(self, answers: Answers, action: str | None) -> str:
        what = "the start" if action is None else f"the action {action!r}"
        after = f", after {answers.actions}" if answers.actions else ""
        return (
            f"rollout.tools is replay, and the record in {self._folder} has no answer to {what} in "
            f"turn {len(answers.rows)} of {sample_name(answers.sample)} of "
            f"{answers.sample['iteration']}{after} (request {answers.request}): it is of other "
            "params, data or weights. Set rollout.tools: record to ask for what it lacks"
        )


NO_RECORD = Record(Tools.LIVE, Path())


def recorded(
    tools: Tools, samples: Iterable[Mapping[str, Any]], completions: Sequence[Completion]
) -> list[ToolAnswerRow]:
    """What is to be kept of what these samples, whose iteration is named, were answered."""
    if tools is Tools.LIVE:
        return []
    rows = [
        {**_sample(sample), **answer}
        for sample, completion in zip(samples, completions, strict=True)
        for answer in completion.answers or ()
    ]
    names = columns_of(ToolAnswerRow, rows[0] if rows else ()).names
    return [{name: row[name] for name in names} for row in rows]  # type: ignore[misc]


def tell_times(
    ctx: Context, samples: Sequence[Mapping[str, Any]], completions: Sequence[Completion]
) -> None:
    """How long answers took: as a table of the run, since they differ from run to run."""
    rows = [
        {**_sample(sample), "turn": answer["turn"], "seconds": answer["seconds"]}
        for sample, completion in zip(samples, completions, strict=True)
        for answer in completion.answers or ()
    ]
    asked = [row for row in rows if row["seconds"] is not None]
    asked.sort(key=lambda row: row["seconds"], reverse=True)
    text = f"{len(rows)} answers of environments, {len(rows) - len(asked)} of them from the record"
    if asked:
        mean = sum(row["seconds"] for row in asked) / len(asked)
        text += f"; the others took {mean:.3f} s on average, at most {asked[0]['seconds']:.3f} s"
        ctx.table("slowest_answers", asked[:SLOWEST])
    print(text)


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in ("iteration", "prompt_id", "sample_index")}


def answers_of(
    environment: str, row: Mapping[str, Any], given: Any, seed: int, *, with_ids: bool = False
) -> Answers:
    """For a new episode of a sample, whose environment is given this."""
    return Answers(_sample(row), seed, first_request(environment, given, seed), with_ids)


def _rows(file: Path) -> list[ToolAnswerRow]:
    try:
        with pq.ParquetFile(file) as opened:
            present = opened.schema_arrow.names
            names = columns_of(ToolAnswerRow, present).names
            lacking = [name for name in names if name not in present]
            rows: list[ToolAnswerRow] = opened.read(names).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise StageError(
            f"{file} cannot be read as a record of answers ({error}): remove it, or copy it again"
        ) from error
    if lacking:
        raise StageError(
            f"{file} has no column {lacking[0]!r}: it is no record of answers; remove it"
        )
    return rows
