"""The environment's reward of an episode, as a source of rewards: it is in the row already."""

from collections.abc import Sequence

from stages.context import StageError
from stages.rewards.given import Row, name_of


class PaidScorer:
    """Reads the reward off each row."""

    def __init__(self, name: str) -> None:
        self._name = name

    def score(self, rows: Sequence[Row]) -> list[float]:
        for row in rows:
            if row["environment_reward"] is None:
                raise StageError(
                    f"rewards.{self._name}: no environment has paid for {name_of(row)}: set "
                    "rollout.environment, and roll out again"
                )
        return [float(row["environment_reward"]) for row in rows]

    def close(self) -> None:
        """Nothing was opened."""
