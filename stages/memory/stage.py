"""What one stage needs: of each GPU, and of each node's own memory, at the moment that takes most.

Lengths are bounds, since data have none before they are prepared: a row has `model.max_length`
tokens, a response `rollout.max_new_tokens` of them; what environments say comes on top.

Not counted: rows in memory, pages of mapped files (which the kernel takes back when it needs them),
servers that `rewards` names.
"""

from collections import Counter
from dataclasses import dataclass, replace

from stages.contracts.objectives import PreferenceLoss, RewardObjective
from stages.contracts.params import Params
from stages.contracts.policy_update import Critic, DpoReference
from stages.contracts.rl import Algorithm, Reward
from stages.contracts.sharding import Sharding
from stages.memory.model import (
    CUDA_CONTEXT,
    CUDA_LIBRARIES,
    Layout,
    Model,
    Part,
    Parts,
    Sampling,
    read_weights,
    reading,
    torch_sampler,
    vllm_sampler,
)
from stages.memory.work import Peak, Peaks, Shapes, Work, in_its_share, times


@dataclass(frozen=True)
class Needs:
    """Of one stage."""

    gpu: Peak | None
    """Of one GPU; None where the stage uses none."""
    host: Peak
    """Of one node."""
    longest: int
    """Tokens of the longest sequence."""
    tokens: int
    """Of the largest pass; 0 where none is learnt from."""


def needs(stage: str, params: Params, shapes: Shapes, layout: Layout) -> Needs | None:
    """Of a stage by its name without `@policy`; None where it has no model, or an unknown one."""
    describe = STAGES.get(stage)
    work = Work(params, shapes, layout)
    if describe is None or shapes.policy is None:
        return None
    peaks = [Peak(when, parts) for when, parts in describe(work)]
    if not peaks:
        return None
    device = max(peaks, key=lambda peak: peak.total)
    if layout.on_gpu:
        libraries = Counter({Part.PROCESSES: CUDA_CONTEXT + CUDA_LIBRARIES})
        gpu = Peak(device.when, device.parts + libraries)
        host = max(work.host_peaks(), key=lambda peak: peak.total)
    else:
        gpu = None
        host = Peak(device.when, times(device.parts, layout.tasks_per_node) + work.processes())
    return Needs(gpu, host, work.longest, work.tokens)


def _sft(work: Work) -> Peaks:
    params = work.params.sft
    if not params.epochs:
        return
    learner = work.learner(work.base, averaged=params.ema_decay > 0)
    yield from work.learns([learner], params.batch_size, work.params.model.max_length)


def _reward_model(work: Work) -> Peaks:
    params = work.params.reward_model
    sides = 2 if params.objective is RewardObjective.BRADLEY_TERRY else 1
    for model in work.reward_start:
        if not params.epochs:
            yield from work.reads(replace(model, alone=False), Part.WEIGHTS)
            work.loaded.append(model)  # to be copied
            continue
        learner = work.learner(model, averaged=params.ema_decay > 0)
        yield from work.learns([learner], params.batch_size, sides * work.params.model.max_length)


def _preference(work: Work) -> Peaks:
    params = work.params.preference
    learner = work.learner(work.policy, averaged=params.ema_decay > 0)
    sides = 1 if params.loss is PreferenceLoss.KTO else 2
    yield from work.learns([learner], params.batch_size, sides * work.params.model.max_length)


def _reference_logprobs(work: Work) -> Peaks:
    yield from work.reads(work.policy, Part.REFERENCE)


def _rollout(work: Work) -> Peaks:
    yield from work.samples(work.params.rollout.samples)


def _sources(work: Work) -> list[str]:
    """Of the rewards to learn from."""
    return [*(work.params.score.weights or {work.params.rl.reward: 1.0})]


def _rewarding(work: Work) -> list[Model]:
    """The reward model, where it rates."""
    return work.reward_model if Reward.REWARD_MODEL in _sources(work) else []


def _score(work: Work) -> Peaks:
    for model in _rewarding(work):
        yield from work.reads(model, Part.REWARD_MODEL)
    yield from work.classifies(_sources(work))
    if work.params.score.reference:
        yield from work.reads(work.policy, Part.REFERENCE)


def _evaluate(work: Work) -> Peaks:
    yield from work.samples(work.params.evaluate.samples + 1)
    yield from work.reads(work.policy, Part.REFERENCE)
    sources = (work.params.rl.reward, work.params.evaluate.correct)
    for model in work.reward_model if Reward.REWARD_MODEL in sources else ():
        yield from work.reads(model, Part.REWARD_MODEL)
    yield from work.classifies(sources)


def _learners(work: Work) -> list[Model]:
    """The policy and, for PPO, the critic."""
    params = work.params
    policy = work.policy
    start = params.policy_update.critic
    if params.rl.algorithm is not Algorithm.PPO or start is Critic.NONE:
        return [work.learner(policy)]
    if start is Critic.AUTO:
        is_given = params.rl.reward == Reward.REWARD_MODEL
        start = Critic.REWARD_MODEL if is_given else Critic.POLICY
    if start is Critic.REWARD_MODEL:
        return [work.learner(model) for model in (policy, *work.reward_model)]
    # The policy's adapter is merged, and the critic has one of its own.
    critic = work.learner(replace(policy, scalar=True))
    return [work.learner(policy), replace(critic, merged=policy.merged)]


def _updates(work: Work, beside: Parts, read: list[tuple[Model, Part]]) -> Peaks:
    """The steps of an update, and the passes without gradients before them by these models."""
    params, learners = work.params, _learners(work)
    pairs = params.rl.algorithm is Algorithm.DPO
    length = (2 if pairs else 1) * work.longest
    yield from work.learns(learners, params.policy_update.batch_size, length, beside)
    kept = beside + work.resident(learners)
    for model, part in read:
        yield from work.reads(model, part, kept)


def _read_by_update(work: Work) -> list[tuple[Model, Part]]:
    params = work.params
    if params.rl.algorithm is Algorithm.DISTILL:
        return [(teacher, Part.TEACHER) for teacher in work.teacher]
    if (
        params.rl.algorithm is Algorithm.DPO
        and params.policy_update.dpo_reference is DpoReference.SFT
    ):
        return [(work.policy, Part.REFERENCE)]
    return []


def _policy_update(work: Work) -> Peaks:
    yield from _updates(work, Counter(), _read_by_update(work))


def _online(work: Work) -> Peaks:
    """Everything stays: what is read once is resident from then on. Samplers have the policy."""
    params, layout, model = work.params, work.layout, work.policy
    read = _read_by_update(work)
    if params.score.reference and Part.REFERENCE not in [part for _, part in read]:
        read.append((model, Part.REFERENCE))
    read += [(rating, Part.REWARD_MODEL) for rating in _rewarding(work)]
    residents: Parts = Counter()
    for each, part in read:
        residents[part] += read_weights(each, layout)
        work.loads(each)
    classifiers = work.classifiers(_sources(work))
    for each, _ in classifiers:
        residents[Part.CLASSIFIER] += each.bytes
        work.loads(each)
    rollout = params.rollout
    sampling = Sampling(rollout.batch_size, rollout.samples, work.longest)
    kept = work.resident(_learners(work))
    if layout.samplers:
        yield from work.samples(rollout.samples)
        own: Parts = Counter()
        if work.uses_vllm:
            # As below, among fewer; counted as if they were on the nodes of those that learn.
            work.on_host[Part.SAMPLER] += model.bytes // layout.samplers
    elif work.uses_vllm:
        least = vllm_sampler(model, sampling, layout)
        yield "sampling", in_its_share(least, layout)
        share = max(least.total(), round(layout.generator_memory * layout.gpu_memory))
        yield "sampling", residents + kept + Counter({Part.SAMPLER: share})
        # Asleep, it has dropped its weights; each rank hashes a copy of its part of them.
        work.on_host[Part.SAMPLER] += model.bytes // layout.world
        own = Counter()
    else:
        is_spread = layout.sharding is not Sharding.NONE
        apart = params.online.overlap or params.lora.rank > 0 or is_spread
        work.loaded += [model] if apart else []
        own = torch_sampler(model, sampling, layout, owns_weights=apart)
        own += Counter({Part.SAMPLER: model.bytes if apart else 0})
        yield "sampling", residents + kept + own
        # What a pass over prompts takes is free again, what overlaps is not.
        if not params.online.overlap:
            own[Part.ACTIVATIONS] = 0
    yield from _updates(work, residents + own, [])
    tokens = max(layout.micro_tokens, work.longest)
    for each, at_once in [*((each, tokens) for each, _ in read), *classifiers]:
        yield "reading", residents + own + kept + reading(each, at_once, layout)


STAGES = {
    "sft": _sft,
    "reward_model": _reward_model,
    "preference": _preference,
    "reference_logprobs": _reference_logprobs,
    "rollout": _rollout,
    "score": _score,
    "policy_update": _policy_update,
    "online": _online,
    "evaluate": _evaluate,
    "evaluate_sft": _evaluate,
    "evaluate_preference": _evaluate,
    "evaluate_online": _evaluate,
}
"""What each stage that has a model holds, moment by moment."""
