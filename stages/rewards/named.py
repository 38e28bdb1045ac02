"""The sources that params.yaml names under `rewards`: each by its params and the user's folder.

An artifact of a source, `artifacts/rewards/NAME`, is both: source.json, and a copy of the folder as
it was. So whoever has the artifact can score by it.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import TypeAdapter

from stages.context import Context
from stages.contracts.rewards import AnySource, Code, Function, Http, Judge, Model, Paid
from stages.data.artifacts import set_modes, write_json
from stages.engines.processes.parts import UNIT_ROWS, Compute, Pass
from stages.rewards.code import CodeScorer
from stages.rewards.given import Row, given
from stages.rewards.isolated import Workers
from stages.rewards.judge import JudgeScorer
from stages.rewards.local import FunctionScorer, RuleScorer
from stages.rewards.paid import PaidScorer
from stages.rewards.served import HttpScorer

if TYPE_CHECKING:
    from stages.engines.models.loaders import Loaders

FRESH_WORKERS = Workers()
_PARAMS, _FOLDER = "source.json", "folder"


class Scorer(Protocol):
    """Rewards for rows that are `given`, in their order; closed when it is no longer needed."""

    def score(self, rows: Sequence[Row]) -> list[float]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class NamedSource:
    """A source, and where the files are that it names."""

    name: str
    params: AnySource
    folder: Path

    @classmethod
    def load(cls, name: str, artifact: Path) -> "NamedSource":
        values = json.loads((artifact / _PARAMS).read_text(encoding="utf-8"))
        return cls(name, TypeAdapter(AnySource).validate_python(values), artifact / _FOLDER)

    def save(self, artifact: Path) -> None:
        write_json(artifact / _PARAMS, self.params.model_dump(mode="json"))
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        # Of a folder with models, only the one that is meant.
        part = self.params.folder if isinstance(self.params, Model) else ""
        shutil.copytree(self.folder / part, artifact / _FOLDER / part, ignore=ignored)
        set_modes(artifact)


def open_scorer(
    ctx: Context,
    source: NamedSource,
    rows: Sequence[Row],
    workers: Workers = FRESH_WORKERS,
    load: "Loaders | None" = None,
) -> Scorer:
    """A scorer of these rows, which are `given`; StageError where the source cannot score them."""
    name, params, folder = source.name, source.params, source.folder
    match params:
        case Function():
            return FunctionScorer(ctx, name, params, folder, rows)
        case Code():
            return CodeScorer(ctx, name, params)
        case Model():
            # A process that scores by rules alone does not load torch for it.
            from stages.engines.models.loaders import FRESH
            from stages.rewards.classifier import ModelScorer

            return ModelScorer(ctx, name, params, folder, (load or FRESH).classifier)
        case Http():
            return HttpScorer(ctx, name, params, rows)
        case Judge():
            return JudgeScorer(ctx, name, params, folder, rows)
        case Paid():
            return PaidScorer(name)
        case _:
            return RuleScorer(ctx, name, params, folder, workers)


def named_pass(
    ctx: Context,
    name: str,
    source: NamedSource,
    rows: Sequence[Row],
    workers: Workers = FRESH_WORKERS,
    load: "Loaders | None" = None,
) -> Pass:
    """One reward for each row, in units that shards share out."""
    opened: list[Scorer] = []

    def begin() -> Compute:
        plain = [given(row) for row in rows]
        scorer = open_scorer(ctx, source, plain, workers, load)
        opened.append(scorer)
        return lambda unit: scorer.score(plain[unit.start : unit.stop])

    def close() -> None:
        while opened:
            opened.pop().close()

    return Pass(name, len(rows), UNIT_ROWS, begin, close=close, phase=f"rewards from {source.name}")
