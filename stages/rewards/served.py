"""http: rewards from a server, by batches.

POST {"prompts": [...], "responses": [...], ...} is answered by {"rewards": [...]}, a number for
each response. A server's rewards are what it says at the time: two scorings agree as far as it
does.
"""

from collections.abc import Sequence
from typing import Any

from stages.context import Context, StageError
from stages.contracts.rewards import Http
from stages.data.finite import is_finite
from stages.rewards.given import Row, column_names, columns, names_of
from stages.rewards.remote import NoAnswer, Server
from stages.rewards.side_by_side import BatchScorer

SHOWN = 60


class HttpScorer(BatchScorer):
    def __init__(self, ctx: Context, name: str, params: Http, rows: Sequence[Row]) -> None:
        super().__init__(ctx, params.concurrency, params.batch_size)
        self._name, self._columns = name, params.columns
        self._server = Server(name, params)
        known = column_names(rows)
        if unknown := [column for column in params.columns if column not in known]:
            raise StageError(
                f"rewards.{name}.columns names {', '.join(unknown)}, which no row has; there are "
                f"{', '.join(known)}"
            )

    def _of_batch(self, batch: Sequence[Row]) -> list[float]:
        message = columns(batch, self._columns)
        try:
            answer = self._server.ask(message, self._given_up.is_set)
        except NoAnswer as problem:
            raise StageError(f"reward {self._name!r} for {names_of(batch)}: {problem}") from None
        return self._numbers(answer, batch)

    def _numbers(self, answer: Any, batch: Sequence[Row]) -> list[float]:
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        begin = f"reward {self._name!r}: {self._server.url} answered"
        if not isinstance(rewards, list):
            raise StageError(f'{begin} no {{"rewards": [...]}} for {names_of(batch)}')
        if len(rewards) != len(batch):
            raise StageError(
                f"{begin} {len(rewards)} rewards for {len(batch)} responses: {names_of(batch)}"
            )
        for row, reward in zip(batch, rewards, strict=True):
            if isinstance(reward, bool) or not isinstance(reward, int | float):
                shown = self._server.shown(repr(reward))
                raise StageError(f"{begin} {shown}, not a number, for {names_of([row])}")
            if not is_finite(reward):
                raise StageError(f"{begin} {str(reward)[:SHOWN]} for {names_of([row])}")
        return [float(reward) for reward in rewards]
