"""Iterated DPO: pairs are made from the policy's own responses, learnt from, and made again.

`best`: of each prompt's responses the one with the highest reward is preferred to the one with the
lowest (Xiong et al. 2023; Guo et al. 2024). `demonstrations`: what was demonstrated is preferred to
what the policy says itself (SPIN, Chen et al. 2024). The reference is the policy before the update,
or the SFT policy.
"""

from stages.algorithms.preference import PreferenceObjective
from stages.context import StageError
from stages.contracts.objectives import REFERENCE_FREE
from stages.contracts.policy_update import Chosen, DpoReference
from stages.data.artifacts import read_parquet
from stages.data.finite import sample_name
from stages.data.schema import DemonstrationRow, ScoredRollout
from stages.engines.forward.inference import kept_over_responses, logprobs_by
from stages.engines.training.resume import Metrics
from stages.learning.experience import measure
from stages.learning.pairs import preference
from stages.learning.update import Rollouts, SampleRole, Update, UpdateResult, by_prompt, trained_on


def learn_from_own_pairs(update: Update) -> UpdateResult:
    """One iteration of DPO on pairs of this iteration's rollouts."""
    params = update.config.policy_update
    measured = measure(update.ctx, update.policy.model, update.rollouts, update.config)
    if params.chosen is Chosen.BEST:
        chosen, rejected = best_and_worst(update.rollouts)
    else:
        chosen, rejected = _demonstrated(update)
    references = zip(
        _reference(update, "chosen", chosen), _reference(update, "rejected", rejected), strict=True
    )
    pairs = [
        {
            "prompt_id": loser["prompt_id"],
            "prompt_ids": loser["prompt_ids"],
            "chosen_ids": winner["response_ids"],
            "rejected_ids": loser["response_ids"],
            "chosen_mask": winner["loss_mask"],
            "rejected_mask": loser["loss_mask"],
            "chosen_starts": winner.get("segment_starts"),
            "rejected_starts": loser.get("segment_starts"),
            "chosen_histories": winner.get("segment_histories"),
            "rejected_histories": loser.get("segment_histories"),
            "chosen_ref": chosen_ref,
            "rejected_ref": rejected_ref,
        }
        for winner, loser, (chosen_ref, rejected_ref) in zip(
            chosen, rejected, references, strict=True
        )
    ]
    work = preference(
        update.policy.model,
        pairs,
        update.ctx.device,
        PreferenceObjective(
            params.dpo_loss,
            params.dpo_beta,
            label_smoothing=params.dpo_label_smoothing,
            margin=params.dpo_margin,
            nll_coef=params.dpo_nll_coef,
        ),
        describe=lambda i: f"the pair with the rejected {sample_name(rejected[i])}",
        temperature=update.config.temperature,
    )
    shown = ["loss", "preference_accuracy", "reward_margin"]
    history: list[Metrics] = update.train(update.plan(len(pairs)), work, shown)
    metrics = {
        **measured.metrics(),
        **measured.kl_metrics(),
        "num_pairs": len(pairs),
    }
    used = trained_on(rejected, SampleRole.REJECTED)
    if params.chosen is Chosen.BEST:
        # A demonstration is no sample: only what it was preferred to is listed.
        used += trained_on(chosen, SampleRole.CHOSEN)
    return UpdateResult(history, used, metrics)


def best_and_worst(rollouts: Rollouts) -> tuple[list[ScoredRollout], list[ScoredRollout]]:
    """The best and the worst response to each prompt, where they differ in reward and in text."""
    chosen, rejected = [], []
    for rows in by_prompt(rollouts):
        # Of equals the first sample: max and min keep the one they see first.
        best = max(rows, key=lambda row: row["reward"])
        worst = min(rows, key=lambda row: row["reward"])
        if best["reward"] > worst["reward"] and best["response_ids"] != worst["response_ids"]:
            chosen.append(best)
            rejected.append(worst)
    if not chosen:
        raise StageError(
            "no prompt has two responses of different reward, so there is no pair to learn from: "
            "raise rollout.samples or rollout.temperature, or draw other prompts"
        )
    return chosen, rejected


def _demonstrated(update: Update) -> tuple[list[ScoredRollout], list[ScoredRollout]]:
    """Each response, and the demonstration of its prompt that it is compared with."""
    shown: dict[str, DemonstrationRow] = {}
    for of_prompt in read_parquet(update.inputs["demonstrations"], DemonstrationRow):
        shown.setdefault(of_prompt["prompt_id"], of_prompt)
    chosen: list[ScoredRollout] = []
    rejected: list[ScoredRollout] = []
    for row in update.rollouts:
        demonstration = shown[row["prompt_id"]]
        completion = demonstration["completion_ids"]
        if completion != row["response_ids"]:
            mask = demonstration["loss_mask"]
            shown_row: ScoredRollout = {**row, "response_ids": completion, "loss_mask": mask}
            chosen.append({**shown_row, "segment_starts": [], "segment_histories": []})
            rejected.append(row)
    if not chosen:
        raise StageError(
            "every response is its prompt's demonstration already: there is nothing left to learn"
        )
    return chosen, rejected


def _reference(update: Update, side: str, responses: Rollouts) -> list[float]:
    """The sum of the reference's log-probs of each response; zeros where the loss has none."""
    params = update.config.policy_update
    if params.dpo_loss in REFERENCE_FREE:
        return [0.0] * len(responses)
    if params.dpo_reference is DpoReference.SFT:
        return [sum(row["ref_logprobs"] or ()) for row in responses]
    by_reference = logprobs_by("reference", lambda: update.policy.model, update.config.temperature)
    return list(
        map(sum, kept_over_responses(update.ctx, f"reference-{side}", responses, by_reference))
    )
