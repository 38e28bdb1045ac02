"""The reward of each response, from whichever source params.yaml names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.context import Context, StageError
from stages.contracts.rl import Reward
from stages.engines.inference import over_responses
from stages.engines.models import load_scalar_model, sequence_rewards
from stages.rewards.verifier import Verifier


def rewards_of(
    ctx: Context, source: Reward, folder: Path, rows: Sequence[Mapping[str, Any]], **options: Any
) -> list[float]:
    """One reward for each row of prompt_ids, response_ids, response, answer and finish_reason.

    A reward model is loaded for the call and let go after it.
    """
    if source is Reward.REWARD_MODEL:
        model = load_scalar_model(folder, ctx.device)
        return over_responses(
            ctx, model, rows, lambda batch: sequence_rewards(model, batch), **options
        )
    verifier = Verifier.load(folder)
    for row in rows:
        if row["answer"] is None:
            raise StageError(
                f"the prompt {row['prompt']!r} has no 'answer', which rl.reward: verifier compares "
                "with: add it to its row in prompts.jsonl, or set rl.reward to reward_model"
            )
    return [
        verifier.reward(row["response"], row["answer"], ended=row["finish_reason"] == "stop")
        for row in rows
    ]
