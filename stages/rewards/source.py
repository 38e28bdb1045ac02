"""The one door to rewards, for score and evaluate: a source, and the pass that scores rows by it.

A source is the reward model or the verifier, by its artifact (`BuiltIn`), or one that params.yaml
names under `rewards` (`NamedSource`). `rewards_from` gives one finite reward per row, whatever the
source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.context import Context, StageError
from stages.contracts.precision import Precision
from stages.contracts.reward_rules import Rule
from stages.contracts.rewards import Model
from stages.contracts.rl import Reward
from stages.data.finite import check_finite, sample_name
from stages.data.schema import ResponseRow
from stages.data.segments import as_last_read
from stages.engines.forward.inference import Quantity, response_pass
from stages.engines.models.loaders import FRESH, Loaders
from stages.engines.processes.parts import UNIT_ROWS, Compute, Pass
from stages.rewards.isolated import Workers
from stages.rewards.model import RewardRule
from stages.rewards.named import FRESH_WORKERS, NamedSource, named_pass
from stages.rewards.verifier import Verifier


@dataclass(frozen=True)
class BuiltIn:
    """The reward model or the verifier."""

    name: str
    folder: Path


Source = BuiltIn | NamedSource


def load_source(name: str, artifact: Path) -> Source:
    """The source that `rl.reward` or `evaluate.correct` names, from its artifact."""
    if name in (Reward.REWARD_MODEL, Reward.VERIFIER):
        return BuiltIn(name, artifact)
    return NamedSource.load(name, artifact)


def needs_answer(source: Source) -> bool:
    """Whether the source cannot score a row without an `answer`."""
    if isinstance(source, BuiltIn):
        return source.name == Reward.VERIFIER
    return isinstance(source.params, Rule) and source.params.needs_answer


def computes_elsewhere(source: Source) -> bool:
    """Whether a source leaves this process's memory and device to the models."""
    return isinstance(source, NamedSource) and not isinstance(source.params, Model)


def rewards_from(
    source: Source,
    ctx: Context,
    pass_name: str,
    rows: Sequence[ResponseRow],
    precision: Precision,
    load: Loaders = FRESH,
    workers: Workers = FRESH_WORKERS,
) -> Pass:
    """One reward for each response."""
    if isinstance(source, NamedSource):
        return named_pass(ctx, pass_name, source, rows, workers, load)
    folder, phase = source.folder, f"rewards from {source.name}"
    what = f"the reward from {source.name}"
    if source.name == Reward.REWARD_MODEL:
        rule = RewardRule.load(folder)
        model = lambda: load.scalar(folder, ctx.device, precision)  # noqa: E731
        last_read = [as_last_read(row) for row in rows]
        return response_pass(ctx, pass_name, last_read, Quantity(what, phase, model, rule.rewards))
    for row in rows:
        if row["answer"] is None:
            raise StageError(
                f"the prompt {row['prompt']!r} has no 'answer', which the verifier compares with: "
                "add it to its row in the data, or take the verifier out of rl.reward and "
                "score.weights"
            )
    verify = lambda: _verified(Verifier.load(folder), rows, what)  # noqa: E731
    return Pass(pass_name, len(rows), UNIT_ROWS, verify, phase=phase)


def _verified(verifier: Verifier, rows: Sequence[ResponseRow], what: str) -> Compute:
    def of_unit(unit: range) -> list[float]:
        rewards = []
        for row in rows[unit.start : unit.stop]:
            assert row["answer"] is not None
            ended = row["finish_reason"] == "stop"
            rewards.append(verifier.reward(row["response"], row["answer"], ended=ended))
            check_finite(what, sample_name(row), rewards[-1])
        return rewards

    return of_unit
