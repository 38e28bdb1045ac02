"""The reward of each response, from whichever source params.yaml names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.context import Context, StageError
from stages.contracts.precision import Precision
from stages.contracts.reward_rules import Rule
from stages.contracts.rl import Reward
from stages.data.finite import check_finite, sample_name
from stages.engines.forward.inference import UNIT_ROWS, response_pass
from stages.engines.models.loaders import FRESH, Loaders
from stages.engines.processes.parts import Compute, Pass
from stages.rewards.model import RewardRule
from stages.rewards.named import NamedSource, named_pass
from stages.rewards.verifier import Verifier

Rows = Sequence[Mapping[str, Any]]


def needs_answer(source: str, folder: Path) -> bool:
    """Whether the source can say nothing of a row without an `answer`."""
    if source in (Reward.REWARD_MODEL, Reward.VERIFIER):
        return source == Reward.VERIFIER
    params = NamedSource.load(source, folder).params
    return isinstance(params, Rule) and params.needs_answer


def reward_pass(
    ctx: Context,
    name: str,
    source: str,
    folder: Path,
    precision: Precision,
    rows: Rows,
    load: Loaders = FRESH,
) -> Pass:
    """One reward for each row of rollouts, or of prompts with a response and a finish_reason.

    `source` is the reward model, the verifier or a name in `rewards`; `folder` its artifact.
    """
    if source == Reward.REWARD_MODEL:
        rule = RewardRule.load(folder)
        model = lambda: load.scalar(folder, ctx.device, precision)  # noqa: E731
        what, phase = _what(source), _phase(source)
        return response_pass(ctx, name, rows, model, rule.rewards, what, phase=phase)
    if source != Reward.VERIFIER:
        return named_pass(ctx, name, NamedSource.load(source, folder), rows, load=load)
    for row in rows:
        if row["answer"] is None:
            raise StageError(
                f"the prompt {row['prompt']!r} has no 'answer', which the verifier compares with: "
                "add it to its row in the data, or take the verifier out of rl.reward and "
                "score.weights"
            )
    return Pass(
        name,
        len(rows),
        UNIT_ROWS,
        lambda: _checked(_verified(Verifier.load(folder), rows), source, rows),
        phase=_phase(source),
    )


def _verified(verifier: Verifier, rows: Rows) -> Compute:
    return lambda unit: [
        verifier.reward(row["response"], row["answer"], ended=row["finish_reason"] == "stop")
        for row in rows[unit.start : unit.stop]
    ]


def _checked(compute: Compute, source: str, rows: Rows) -> Compute:
    """Refuse a reward that is not a number before it is kept."""

    def of_unit(unit: range) -> Sequence[Any]:
        rewards = compute(unit)
        for index, reward in zip(unit, rewards, strict=True):
            check_finite(_what(source), sample_name(rows[index]), reward)
        return rewards

    return of_unit


def _phase(source: str) -> str:
    return f"rewards from {source}"


def _what(source: str) -> str:
    return f"the reward from {source}"
