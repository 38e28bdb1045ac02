"""Scorers that compute here, in processes of their own: built-in rules and users' functions.

Each reward is a finite number, or the stage fails with the source, the row and what went wrong.
"""

import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.context import Context, StageError
from stages.contracts.reward_rules import AnyRule, CorrectnessRule
from stages.contracts.rewards import Function
from stages.rewards.given import Row, column_names, names_of
from stages.rewards.isolated import CannotScore, Hung, Isolated, Workers
from stages.rewards.side_by_side import BatchScorer

SEARCH_TIMEOUTS = 3
"""Limit of the search for the row that a function fails at, in timeouts."""

WALL_TIMES, WALL_SECONDS = 10, 60
"""Wall-clock limit of a rule: its CPU time limit so many times, and so many seconds more."""


class _ProcessScorer(BatchScorer):
    """Some processes of one kind, each busy with one call at a time."""

    def __init__(
        self,
        ctx: Context,
        order: Mapping[str, Any],
        concurrency: int,
        workers: Workers,
        batch_size: int = 1,
    ) -> None:
        super().__init__(ctx, concurrency, batch_size)
        self._workers = workers
        self._all = [workers.take(order) for _ in range(concurrency)]
        self._idle = list(self._all)

    def close(self) -> None:
        while self._all:
            self._workers.give_back(self._all.pop())

    def _give_up(self) -> None:
        """End the calls under way; whoever made them hears that it is over, and starts no more."""
        super()._give_up()
        for process in self._all:
            process.end()

    def _of_batch(self, batch: Sequence[Row]) -> list[float]:
        process = self._idle.pop()
        try:
            return self._asked(process, batch)
        finally:
            self._idle.append(process)

    @abstractmethod
    def _asked(self, process: Isolated, batch: Sequence[Row]) -> list[float]: ...


class RuleScorer(_ProcessScorer):
    """A built-in rule, row by row."""

    def __init__(
        self, ctx: Context, name: str, params: AnyRule, folder: Path, workers: Workers
    ) -> None:
        order = {
            "rule": params.model_dump(mode="json"),
            "folder": str(folder),
            "seconds": params.timeout,
        }
        super().__init__(ctx, order, params.concurrency, workers)
        self._name, self._params = name, params

    def _asked(self, process: Isolated, batch: Sequence[Row]) -> list[float]:
        what = f"reward {self._name!r} ({self._params.kind})"
        try:
            return process.score(batch, WALL_TIMES * self._params.timeout + WALL_SECONDS)
        except CannotScore as refused:
            raise StageError(f"{what} cannot score {names_of(batch)}: {refused}") from None
        except Hung:
            seconds = f"{self._params.timeout:g} s"
            instead = self._params.on_timeout if isinstance(self._params, CorrectnessRule) else None
            if instead is None:
                raise StageError(
                    f"{what} did not finish within {seconds} for {names_of(batch)}: raise "
                    f"rewards.{self._name}.timeout, or look at the response"
                ) from None
            print(
                f"{what} did not finish within {seconds} for {names_of(batch)}: its reward is "
                f"{instead:g}",
                file=sys.stderr,
            )
            return [instead for _ in batch]


class FunctionScorer(_ProcessScorer):
    """A function of the user's, batch by batch.

    Where it fails for a batch, it is asked about one row after another: the message then names the
    row, not sixty-four of them. What it may remember ends with the pass.
    """

    def __init__(
        self,
        ctx: Context,
        name: str,
        params: Function,
        folder: Path,
        rows: Sequence[Row] | None = None,
    ) -> None:
        """`rows`: all that it may be asked about; without them, it can only be checked."""
        order = {
            "function": params.function,
            "folder": str(folder.resolve()),
            "columns": None if rows is None else column_names(rows),
        }
        super().__init__(ctx, order, params.concurrency, Workers(), params.batch_size)
        module, _, function = params.function.partition(":")
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        self._what = f"reward {name!r} ({folder.name}/{path.relative_to(folder)}:{function})"
        self._name, self._params = name, params

    def check(self) -> None:
        """Load the function; StageError says why that is impossible."""
        try:
            self._all[0].start()
        except (CannotScore, Hung) as error:
            reason = str(error) or "its module takes too long to import"
            raise StageError(f"{self._what} cannot be loaded: {reason}") from None

    def score(self, rows: Sequence[Row]) -> list[float]:
        self.check()
        return super().score(rows)

    def _asked(self, process: Isolated, batch: Sequence[Row]) -> list[float]:
        try:
            return process.score(batch, self._params.timeout)
        except (CannotScore, Hung) as error:
            if self._given_up.is_set():
                raise
            index = getattr(error, "index", None)
            if index is not None:
                raise self._failure(error, [batch[index]]) from None
            if len(batch) == 1:
                raise self._failure(error, batch) from None
            if culprit := self._culprit(process, batch, error):
                row, alone = culprit
                raised = _way(error).startswith("raised ")
                raise self._failure(alone if raised else error, [row]) from None
            raise self._failure(error, batch, alone=False) from None

    def _culprit(
        self, process: Isolated, batch: Sequence[Row], error: Exception
    ) -> tuple[Row, Exception] | None:
        """The first row that fails the same way by itself, if one does before patience is over.

        A function that needs several rows fails for each of them alone, which says nothing.
        """
        try:
            process.start()
        except (CannotScore, Hung):
            return None
        until = time.monotonic() + SEARCH_TIMEOUTS * self._params.timeout
        for row in batch:
            if self._given_up.is_set() or time.monotonic() > until:
                return None
            try:
                process.score([row], self._params.timeout)
            except (CannotScore, Hung) as alone:
                if _way(alone) == _way(error):
                    return row, alone
        return None

    def _failure(self, error: Exception, rows: Sequence[Row], *, alone: bool = True) -> StageError:
        where = names_of(rows)
        if isinstance(error, Hung):
            problem = f"did not return within {self._params.timeout:g} s"
            remedy = f"raise rewards.{self._name}.timeout or lower its batch_size"
        else:
            problem, remedy = str(error), "fix the function; the log has its whole traceback"
        together = "" if alone else ", though no row of them does so by itself"
        return StageError(f"{self._what} {problem} for {where}{together}: {remedy}")


def _way(error: Exception) -> str:
    """How a function failed, whatever its rows: hung, `raised ValueError`, `returned`, ..."""
    if isinstance(error, Hung):
        return "hung"
    message = str(error)
    return message.partition(":")[0] if message.startswith("raised ") else message.partition(" ")[0]
