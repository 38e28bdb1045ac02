"""Rejection sampling: SFT on the best of a policy's own responses (RAFT, Dong et al. 2023)."""

from dataclasses import replace

from stages.context import StageError
from stages.data.batching import loss_mask
from stages.data.finite import sample_name
from stages.data.schema import ScoredRollout
from stages.data.segments import cut
from stages.engines.training.loop import counted
from stages.learning.experience import measure
from stages.learning.imitation import imitation
from stages.learning.update import Rollouts, SampleRole, Update, UpdateResult, by_prompt, trained_on


def learn_from_the_best(update: Update) -> UpdateResult:
    """Keep the best responses to each prompt and train on them."""
    measured = measure(update.ctx, update.policy.model, update.rollouts, update.config)
    best = the_best(update.rollouts, update.config.policy_update.keep_best)
    pieces, parts = cut(best, range(len(best)))
    work = imitation(
        update.policy.model,
        [piece.row["prompt_ids"] for piece in pieces],
        [piece.row["response_ids"] for piece in pieces],
        update.ctx.device,
        lambda i: sample_name(pieces[i].row),
        [piece.row["loss_mask"] for piece in pieces],
    )
    num_tokens = [sum(loss_mask(row)) for row in best]
    work = replace(work, counts=counted(num_tokens), parts=lambda i: parts[i])
    history = update.train(update.plan(len(best)), work, ["loss", "entropy"])
    rewards = [row["reward"] for row in best]
    metrics = {
        **measured.metrics(),
        **measured.kl_metrics(),
        "kept_share": len(best) / len(update.rollouts),
        "kept_reward_mean": sum(rewards) / len(rewards),
    }
    used = trained_on(best, SampleRole.IMITATED)
    return UpdateResult(history, used, metrics)


def the_best(rollouts: Rollouts, keep: int) -> list[ScoredRollout]:
    """Up to `keep` responses to each prompt that beat another one to it, the best first.

    A response that was cut before it ended is never kept: who imitates it would not end either.
    """
    best = []
    for rows in by_prompt(rollouts):
        worst = min(row["reward"] for row in rows)
        better = [r for r in rows if r["reward"] > worst and r["finish_reason"] == "stop"]
        best += sorted(better, key=lambda row: -row["reward"])[:keep]
    if not best:
        raise StageError(
            "no response that ended beats another one to its prompt, so there is nothing to keep: "
            "raise rollout.samples, rollout.temperature or rollout.max_new_tokens"
        )
    return best
