"""Values of params.yaml that make no sense together, each with the reason and what to do.

A refusal looks at the whole params and yields what is wrong with them; the first is reported.
"""

import difflib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from stages.contracts.lora import LoraSave
from stages.contracts.objectives import Mismatch, PolicyObjective, PreferenceLoss
from stages.contracts.policy_update import Chosen, Critic, DpoReference, PolicyUpdateParams
from stages.contracts.rewards import Paid
from stages.contracts.rl import Algorithm, Reward, TurnCredit
from stages.contracts.rollout import PromptSource

if TYPE_CHECKING:
    from stages.contracts.params import Params

WHITENED = frozenset({Algorithm.REINFORCE_PP, Algorithm.REINFORCE_PP_BASELINE})
BY_TOKEN = WHITENED | {Algorithm.PPO, Algorithm.REINFORCE}
"""Algorithms whose advantages differ from token to token."""
BY_TURN = BY_TOKEN - {Algorithm.REINFORCE_PP_BASELINE} | {Algorithm.GRPO, Algorithm.RLOO}
"""Algorithms that know what to do with a reward at each turn."""
_GRADIENTS = frozenset(algorithm for algorithm in Algorithm if algorithm.is_policy_gradient)
_SAMPLED = _GRADIENTS | {Algorithm.DISTILL}
READ_BY = {
    "objective": _SAMPLED,
    "clip_low": _SAMPLED,
    "clip_high": _SAMPLED,
    "dual_clip": _SAMPLED,
    "entropy_coef": _SAMPLED,
    "overlong_filter": _SAMPLED,
    "mismatch": _SAMPLED,
    "kl_in": _GRADIENTS,
    "kl_target": _GRADIENTS,
    "leave_one_out": frozenset({Algorithm.GRPO}),
    "chosen": frozenset({Algorithm.DPO}),
    "dpo_reference": frozenset({Algorithm.DPO}),
    "dpo_loss": frozenset({Algorithm.DPO}),
    "dpo_beta": frozenset({Algorithm.DPO}),
    "dpo_label_smoothing": frozenset({Algorithm.DPO}),
    "dpo_margin": frozenset({Algorithm.DPO}),
    "dpo_nll_coef": frozenset({Algorithm.DPO}),
    "keep_best": frozenset({Algorithm.BEST_OF_N}),
    "distill_top_k": frozenset({Algorithm.DISTILL}),
}
"""Settings of policy_update that would go unnoticed under other algorithms."""


def _about_groups(params: "Params") -> Iterator[str]:
    algorithm, rollout = params.rl.algorithm, params.rollout
    compares = algorithm.has_groups or (
        algorithm is Algorithm.DPO and params.policy_update.chosen is Chosen.BEST
    )
    if compares and rollout.samples < 2:
        yield (
            f"rl.algorithm is {algorithm}, which compares the responses to one prompt, but "
            f"rollout.samples is {rollout.samples}: set it to 2 or more"
        )
    if rollout.reserve and not compares:
        yield (
            f"rollout.reserve {rollout.reserve} stands in for groups without variance, but "
            f"rl.algorithm {algorithm} compares no groups: set it to 0"
        )
    if algorithm is Algorithm.REMAX and not rollout.greedy_baseline:
        yield (
            "rl.algorithm is remax, which compares with the greedy response: set "
            "rollout.greedy_baseline to true"
        )
    if algorithm is Algorithm.BEST_OF_N and params.policy_update.keep_best >= rollout.samples:
        yield (
            f"policy_update.keep_best {params.policy_update.keep_best} of rollout.samples "
            f"{rollout.samples} rejects nothing: lower keep_best or raise samples"
        )


def _about_the_critic(params: "Params") -> Iterator[str]:
    critic, algorithm = params.policy_update.critic, params.rl.algorithm
    if algorithm is not Algorithm.PPO and critic in (Critic.REWARD_MODEL, Critic.POLICY):
        yield (
            f"policy_update.critic is {critic}, but rl.algorithm {algorithm} has no critic: set it "
            "to none (or auto), or rl.algorithm to ppo"
        )
    if algorithm is Algorithm.PPO and critic is Critic.NONE:
        yield (
            "rl.algorithm is ppo, whose advantages come from a critic, but policy_update.critic "
            "is none: set it to auto, or rl.algorithm to grpo, rloo or another without a critic"
        )
    if critic is Critic.REWARD_MODEL and params.rl.reward != Reward.REWARD_MODEL:
        yield (
            f"policy_update.critic is reward_model, but rl.reward is {params.rl.reward}, so no "
            "reward model is trained: set critic to policy or auto"
        )


def _about_objectives(params: "Params") -> Iterator[str]:
    update, algorithm = params.policy_update, params.rl.algorithm
    if not algorithm.is_policy_gradient:
        return
    if algorithm in BY_TOKEN and update.objective is PolicyObjective.GSPO:
        yield (
            "policy_update.objective gspo has one ratio per response, but rl.algorithm "
            f"{algorithm} has an advantage for each token: set objective to clip, or rl.algorithm "
            "to grpo or rloo"
        )
    if update.objective is PolicyObjective.GRADIENT and update.epochs > 1:
        yield (
            "policy_update.objective gradient has no ratio that corrects for a policy that has "
            f"moved on, but policy_update.epochs is {update.epochs}: set epochs to 1, or objective "
            "to clip"
        )
    if not update.whiten_advantages and algorithm in WHITENED:
        yield (
            f"policy_update.whiten_advantages is false, but rl.algorithm {algorithm} is defined by "
            "its whitening: set it to true, or rl.algorithm to reinforce"
        )


def _about_settings_of_others(params: "Params") -> Iterator[str]:
    """A setting that the algorithm does not read, and that somebody has changed all the same."""
    update, algorithm = params.policy_update, params.rl.algorithm
    for name, readers in READ_BY.items():
        default = PolicyUpdateParams.model_fields[name].default
        if getattr(update, name) != default and algorithm not in readers:
            shown = "null" if default is None else str(default).lower()
            yield (
                f"policy_update.{name} is {getattr(update, name)}, but rl.algorithm {algorithm} "
                f"does not read it: set it back to {shown}"
            )
    if params.rollout.greedy_baseline and algorithm is not Algorithm.REMAX:
        yield (
            "rollout.greedy_baseline is true, but only rl.algorithm remax compares with greedy "
            "responses: set it to false"
        )


def _about_cut_support(params: "Params") -> Iterator[str]:
    algorithm = params.rl.algorithm
    if params.rollout.cuts_support and algorithm in (Algorithm.DPO, Algorithm.DISTILL):
        yield (
            f"rl.algorithm {algorithm} compares log-probs over the whole vocabulary and cannot "
            "correct for tokens that rollout.top_p, top_k or min_p cut off: set them to 1, 0 and 0"
        )


def _about_pairs(params: "Params") -> Iterator[str]:
    if params.rl.algorithm is not Algorithm.DPO:
        return
    if params.policy_update.dpo_loss is PreferenceLoss.KTO:
        yield "rl.algorithm is dpo, which makes pairs, but policy_update.dpo_loss kto takes none"
    source, chosen = params.rollout.source, params.policy_update.chosen
    by_sft = params.policy_update.dpo_reference is DpoReference.SFT
    if chosen is Chosen.DEMONSTRATIONS and by_sft:
        yield (
            "policy_update.chosen is demonstrations, which the SFT policy has not rated: set "
            "policy_update.dpo_reference to previous"
        )
    if chosen is Chosen.DEMONSTRATIONS and source is not PromptSource.DEMONSTRATIONS:
        yield (
            "policy_update.chosen is demonstrations, so the rollouts have to answer their prompts: "
            "set rollout.source to demonstrations"
        )


def _about_rewards(params: "Params") -> Iterator[str]:
    named = {"rl.reward": params.rl.reward, "evaluate.correct": params.evaluate.correct}
    choices = [*(each.value for each in Reward), *params.rewards]
    for key, name in named.items():
        if name not in choices:
            close = difflib.get_close_matches(name, choices, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(choices)}"
            yield f"{key} names {name!r}, which is not a source of rewards: {hint}"
    known = dict.fromkeys([params.rl.reward, Reward.VERIFIER.value, *params.rewards])
    for name in params.score.weights:
        if name not in known:
            *others, last = known
            yield (
                f"score.weights names {name!r}; with rl.reward {params.rl.reward} the sources are "
                f"{', '.join(others)} and {last}"
            )
    used = params.score.weights or {params.rl.reward: 1.0}
    for name in used:
        if params.rollout.environment is None and isinstance(params.rewards.get(name), Paid):
            yield (
                f"rewards.{name} is what an environment pays, but rollout.environment is null: "
                "name one, or another source in rl.reward and score.weights"
            )
    weights = params.score.weights.values()
    if params.score.weights and not any(weights):
        yield "score.weights are all 0, so every reward would be 0: give one source a weight"
    if params.score.overlong_buffer >= params.rollout.max_new_tokens:
        yield (
            f"score.overlong_buffer {params.score.overlong_buffer} leaves nothing of "
            f"rollout.max_new_tokens {params.rollout.max_new_tokens} unpenalised: lower it"
        )


def _about_turns(params: "Params") -> Iterator[str]:
    rl, update = params.rl, params.policy_update
    if rl.turn_credit is TurnCredit.EPISODE:
        if rl.turn_discount != 1:
            yield (
                f"rl.turn_discount is {rl.turn_discount}, but rl.turn_credit episode pays an "
                "episode once: set rl.turn_credit to turn, or turn_discount back to 1.0"
            )
        return
    if params.rollout.environment is None:
        yield (
            "rl.turn_credit is turn, but without rollout.environment there are no turns: name "
            "one, or set turn_credit to episode"
        )
    if rl.algorithm not in BY_TURN:
        *others, last = sorted(BY_TURN)
        yield (
            f"rl.turn_credit is turn, but rl.algorithm {rl.algorithm} learns from the reward of "
            f"whole episodes: set turn_credit to episode, or algorithm to {', '.join(others)} or "
            f"{last}"
        )
    if update.objective is PolicyObjective.GSPO:
        yield (
            "policy_update.objective gspo has one ratio per response, but rl.turn_credit turn an "
            "advantage for each turn: set objective to clip, or turn_credit to episode"
        )
    used = params.score.weights or {rl.reward: 1.0}
    if not any(weight and isinstance(params.rewards.get(name), Paid)
               for name, weight in used.items()):  # fmt: skip
        yield (
            "rl.turn_credit is turn, but no reward in rl.reward or score.weights is of the kind "
            "environment, so no turn would be paid: name one, or set turn_credit to episode"
        )
    for name, unset in (("clip", "null"), ("whiten", "false")):
        if getattr(params.score, name):
            yield (
                f"score.{name} changes the reward of a whole episode, which rl.turn_credit turn "
                f"shares out over its turns: set {name} to {unset}, or turn_credit to episode"
            )


def _about_the_reference(params: "Params") -> Iterator[str]:
    if params.score.reference:
        return
    update, algorithm = params.policy_update, params.rl.algorithm
    if algorithm.is_policy_gradient and update.kl_coef:
        yield (
            f"score.reference is false, but policy_update.kl_coef {update.kl_coef} penalises the "
            "distance from it: set kl_coef to 0, or score.reference to true"
        )
    if algorithm is Algorithm.DPO and update.dpo_reference is DpoReference.SFT:
        yield (
            "score.reference is false, but policy_update.dpo_reference is sft: set it to previous, "
            "or score.reference to true"
        )


def _about_lengths(params: "Params") -> Iterator[str]:
    if params.rollout.max_new_tokens >= params.model.max_length:
        yield (
            f"rollout.max_new_tokens {params.rollout.max_new_tokens} leaves no room for a prompt "
            f"in model.max_length {params.model.max_length}"
        )
    observed = (params.rollout.max_turns - 1) * params.rollout.max_observation_tokens
    longest = params.rollout.max_new_tokens + observed
    limit = params.episodes.context_tokens
    if limit is not None and limit > params.model.max_length:
        yield (
            f"episodes.context_tokens {limit} is more than model.max_length "
            f"{params.model.max_length}: lower it, or raise model.max_length"
        )
    elides = limit is not None
    if params.rollout.environment and not elides and longest >= params.model.max_length:
        yield (
            f"rollout.max_turns {params.rollout.max_turns} with up to "
            f"{params.rollout.max_observation_tokens} observed tokens between two turns and "
            f"{params.rollout.max_new_tokens} of the policy's own leave no room for a prompt in "
            f"model.max_length {params.model.max_length}: lower rollout.max_turns, "
            "rollout.max_observation_tokens or rollout.max_new_tokens, or set "
            "episodes.context_tokens to have old observations elided"
        )
    drawn, available = params.rollout.prompts + params.rollout.reserve, params.prepare.prompts
    from_prompts = params.rollout.source is PromptSource.PROMPTS
    if params.prepare.source == "arithmetic" and from_prompts and drawn > available:
        yield (
            f"rollout.prompts {params.rollout.prompts} and rollout.reserve "
            f"{params.rollout.reserve} are more than the {available} of prepare.prompts"
        )


def _about_fused_steps(params: "Params") -> Iterator[str]:
    if not params.rl.online:
        return
    if params.online.overlap and params.policy_update.mismatch is Mismatch.NONE:
        yield (
            "online.overlap lets a step learn from samples of the policy before, which has to be "
            "corrected for: set policy_update.mismatch to token_truncate or another correction"
        )
    if params.lora.rank and params.lora.save is LoraSave.MERGED:
        yield (
            "lora.save merged makes a fresh adapter at each iteration, and steps in one job "
            "(rl.online) go on with theirs: set lora.save to adapter"
        )


def _about_evaluation(params: "Params") -> Iterator[str]:
    samples, largest = params.evaluate.samples, max(params.evaluate.pass_at, default=0)
    if largest > samples:
        yield (
            f"evaluate.pass_at has {largest}, but evaluate.samples is {samples}, and pass@k needs "
            "at least k samples: raise samples, or take it out of pass_at"
        )


REFUSALS: tuple[Callable[["Params"], Iterator[str]], ...] = (
    _about_groups,
    _about_the_critic,
    _about_objectives,
    _about_settings_of_others,
    _about_cut_support,
    _about_pairs,
    _about_rewards,
    _about_turns,
    _about_the_reference,
    _about_lengths,
    _about_fused_steps,
    _about_evaluation,
)
